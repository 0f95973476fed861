"""ONNX models: recurrent nodes become cells, layers and stacks; nothing is executed."""

from rnnaudit.loaders.onnx.loader import OnnxLoader

__all__ = ["LOADER"]

LOADER = OnnxLoader()
