from dataclasses import dataclass


@dataclass
class Config:
    lr: float = 0.01
    passes: int = 2
