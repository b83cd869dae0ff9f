"""The Ray session that a configuration asks for."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

from cluster.session import Session
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.weight_transport import choose_transport
from retrieval.registry import needs_index


def session_for(config: RunConfig) -> AbstractContextManager[object]:
    """Return a session with room for every actor of the fleets; nothing where all of them are in the driver."""
    runners, retrieval, learners = config.env_runners, config.retrieval, config.learners
    num_index_actors = retrieval.num_retrievers * retrieval.num_shards if needs_index(retrieval.type) else 0
    num_encoders = retrieval.num_encoders if num_index_actors else 0
    num_cpus = (
        runners.num_env_runners * runners.num_cpus_per_env_runner
        + num_index_actors * retrieval.num_cpus_per_retriever
        + num_encoders * retrieval.num_cpus_per_encoder
        + learners.num_learners * learners.num_cpus_per_learner
    )
    num_gpus = num_index_actors * retrieval.num_gpus_per_retriever + num_encoders * retrieval.num_gpus_per_encoder
    if choose_transport(config) == "ipc":  # a bundle is a whole GPU, see cluster/placement.py
        num_gpus += learners.num_learners * math.ceil(learners.num_gpus_per_learner)
    else:
        num_gpus += runners.num_env_runners * runners.num_gpus_per_env_runner
        num_gpus += learners.num_learners * learners.num_gpus_per_learner
    num_actors = runners.num_env_runners + num_index_actors + learners.num_learners
    return Session(num_cpus, num_gpus) if num_actors else nullcontext()
