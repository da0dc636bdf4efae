"""The hand-over of KV blocks between workers."""
