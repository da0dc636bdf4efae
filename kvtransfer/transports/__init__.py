"""Ways for blocks to travel, all behind `base.KVTransport`."""
