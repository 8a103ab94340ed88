"""The rules for scripts of torch.distributed, ``nn.DataParallel`` and apex, in the order in which they are applied."""
