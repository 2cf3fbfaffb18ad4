"""What eviction costs in quality: the tasks, figures and pictures behind `vtoken eval`.

Nothing here knows vLLM. A task turns samples into requests, an `Engine` answers them, and the
task turns answers into figures; `vtoken/vllm/eval_engine.py` has the engine.
"""
