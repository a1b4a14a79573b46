"""Data parallelism: engine replicas as Ray actors, and the router that assigns requests to them."""
