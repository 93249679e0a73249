"""The way through TorchDynamo: a backend of ``torch.compile``, and modules that torch.export cannot trace."""
