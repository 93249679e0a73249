"""Between ONNX files and graphs of the C core, in both directions."""
