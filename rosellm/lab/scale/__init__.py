"""Plan beyond the available machines: how long steps take, and how replicas behave."""
