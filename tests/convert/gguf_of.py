"""``python gguf_of.py LLAMA_CPP FOLDER OUT``: llama.cpp's own converter, in fp32 and without a vocabulary.

It knows tokenizers by a hash of what they make of a text, and refuses those of tests.
"""

import runpy
import sys
from pathlib import Path


def main(sources: str, folder: str, out: str) -> None:
    """Run the converter of these sources of llama.cpp."""
    sys.path[:0] = [sources, str(Path(sources) / "gguf-py")]
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    config = ModelBase.load_hparams(Path(folder), False)
    model = get_model_class(get_model_architecture(config, ModelType.TEXT))
    write = model.set_gguf_parameters

    def with_words(self) -> None:
        write(self)
        if not any(key.endswith(".vocab_size") for part in self.gguf_writer.kv_data for key in part):
            self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])

    model.set_vocab, model.set_gguf_parameters = model._set_vocab_none, with_words
    sys.argv = ["convert_hf_to_gguf.py", folder, "--outfile", out, "--outtype", "f32"]
    runpy.run_path(str(Path(sources) / sys.argv[0]), run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
