"""CHECKPOINT -> PACK, and back: readers of GGUF and safetensors, the conversion, the export."""
