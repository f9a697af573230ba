"""Pipeline parallelism: a model's layers over processes, which torch.distributed connects."""
