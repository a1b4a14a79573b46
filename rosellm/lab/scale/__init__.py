"""Planning past the machines that are here: how long steps take, and how many replicas do."""
