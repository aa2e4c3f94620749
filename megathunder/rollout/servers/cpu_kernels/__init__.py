"""A CPU server's decoder layers in a few fused kernels over prepacked weights: an SGLang plug-in.

    SGLang's own path   request after request, layer after layer: gather keys and values, one attention each; a GEMM
                        that packs its weight anew in every call
    here                norm, GEMM, heads, attention, GEMM, norm, GEMM, activation, GEMM: each once for the whole batch,
                        attention reading keys and values where they lie in the cache

    plugin.py          entry point; which path is taken; what SGLang calls us for
    decoder_layer.py   a decoder layer by the kernels
    packed_weights.py  weights in oneDNN's layout, packed again after every weight update
    interface.py       the kernels, and what one step of the engine gives them
    compiled.py        the kernels in C (kernels.c), compiled once for this CPU
    portable.py        the kernels in plain torch, for machines without a C compiler, and the oracle of the former

Float32 only. A model, a layer or a step that does not fit takes SGLang's own path (`rollout.cpu_kernels = "off"`: all).
"""
