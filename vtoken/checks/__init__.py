"""Online checks: the spec's laws, evaluated while the engine serves. Defines no law itself.

`OnlineChecker` runs beside the scheduler (I2, I4, L5, L7), `WorkerChecker` beside the model
runner (I1, L6). `fast` holds vectorised forms that screen; the spec's predicates judge.
"""
