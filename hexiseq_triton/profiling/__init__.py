"""`hexiseq profile`: measure GPUs and links, and write the cluster file that plans are made for."""
