"""From a module to a graph of ATen ops, its state as inputs."""
