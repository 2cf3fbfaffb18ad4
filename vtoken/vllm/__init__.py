"""vToken on stock vLLM 0.32: the only folder that imports vLLM.

`REGISTER.md` lists every override: target, why, how, when it may go. Import submodules
directly; this package itself imports nothing, so that `vtoken.vllm.enable` stays cheap.
"""
