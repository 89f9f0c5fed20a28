"""Imports the code of Transformers' models that the fuzzer trains, in the process from which ranks are forked.

Each rank would need four seconds of its processor for it.
"""

from transformers import AutoModelForCausalLM, AutoModelForImageClassification  # noqa: F401
from transformers.models.gpt2 import modeling_gpt2  # noqa: F401
from transformers.models.gpt_neox import modeling_gpt_neox  # noqa: F401
from transformers.models.llama import modeling_llama  # noqa: F401
from transformers.models.mixtral import modeling_mixtral  # noqa: F401
from transformers.models.vit import modeling_vit  # noqa: F401
