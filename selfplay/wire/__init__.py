"""Messages between processes: typed, schema-checked at every ingress, over ZeroMQ."""
