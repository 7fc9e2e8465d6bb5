"""`hexiseq doctor`: whether the processes that torchrun started can work together."""
