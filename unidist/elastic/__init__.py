"""Training that goes on when workers are lost, leave or come: ``unidist run --min-np``, ``torchrun --max-restarts``.

@unidist.elastic.run
def train(state):
    model = unidist.wrap_model(state.model)
    ...
    state.commit()

train(unidist.elastic.TorchState(model=model, optimizer=optimizer, epoch=0))
"""

from unidist.elastic.sampler import ElasticSampler
from unidist.elastic.state import ObjectState, State, TorchState
from unidist.elastic.training import run
from unidist.errors import HostsUpdatedInterrupt

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run"]
