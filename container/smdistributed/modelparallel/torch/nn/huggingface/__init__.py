"""``smp.nn.huggingface``: translation of states, model by model."""

from smdistributed.modelparallel.torch.nn.huggingface import bert, gpt2, gptj, gptneo, gptneox, llama, roberta

__all__ = ["bert", "gpt2", "gptj", "gptneo", "gptneox", "llama", "roberta"]
