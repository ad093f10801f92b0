"""One step of fixed shapes: what accelerators run without waiting for the host."""
