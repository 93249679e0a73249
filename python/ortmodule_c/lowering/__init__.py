"""From ATen ops to the nodes of the C core."""
