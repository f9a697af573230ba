"""Mixtures of experts: decoders under Llama's names whose FFNs are many (Shazeer et al., 2017).

A router names the experts of a token exactly, so these models run sparsely whatever their activation.
"""

from flashllm.arch.experts.biased import BIASED_CHOICE
from flashllm.arch.experts.granite import GRANITE
from flashllm.arch.experts.kimi import KIMI_LINEAR
from flashllm.arch.experts.latent import WITH_LATENT
from flashllm.arch.experts.plain import PLAIN

MIXTURES = (*PLAIN, *GRANITE, *BIASED_CHOICE, *WITH_LATENT, KIMI_LINEAR)
