"""The whole system: real processes, real gRPC, a real Redis-protocol server."""
