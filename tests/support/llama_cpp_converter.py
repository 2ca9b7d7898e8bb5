"""Runs llama.cpp's converter, which knows tokenizers by hash, and says that ours splits text as GPT-2's does.

PYTHON tests/support/llama_cpp_converter.py LLAMA_CPP/convert_hf_to_gguf.py CHECKPOINT --outfile model.gguf
"""

import importlib
import sys
from pathlib import Path

METHOD = "get_vocab_base_pre"  # of the converter's classes; names a tokenizer's pre-tokenizer

if __name__ == "__main__":
    converter = Path(sys.argv[1])
    sys.argv, sys.path[0] = sys.argv[1:], str(converter.parent)
    module = importlib.import_module(converter.stem)
    classes = [kind for each in list(sys.modules.values()) for kind in vars(each).values() if isinstance(kind, type)]
    for kind in classes:
        if METHOD in vars(kind):
            setattr(kind, METHOD, lambda self, tokenizer: "gpt-2")
    module.main()
