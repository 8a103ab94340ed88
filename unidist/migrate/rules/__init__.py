"""The rules, in the order in which they are applied. A rule is a function of the module's ``Context``.

It decides about some of Horovod's names and marks their uses as handled, so that later rules pass them by.
"""

from unidist.migrate.rules.barriers import change_barriers, keep_calls_beside_join
from unidist.migrate.rules.calls import change_plain_calls, keep_calls
from unidist.migrate.rules.collectives import change_allreduce, change_collectives
from unidist.migrate.rules.elastic import change_elastic
from unidist.migrate.rules.imports import change_imports
from unidist.migrate.rules.loaders import change_loaders
from unidist.migrate.rules.notices import report_surroundings
from unidist.migrate.rules.optimizers import change_optimizers
from unidist.migrate.rules.processes import change_run
from unidist.migrate.rules.threads import keep_calls_of_threads

#: From Horovod's calls to unidist's own.
NATIVE_RULES = (
    keep_calls,
    keep_calls_of_threads,
    keep_calls_beside_join,
    change_optimizers,
    change_elastic,
    change_barriers,
    change_loaders,
    change_collectives,
    change_allreduce,
    change_plain_calls,
    change_run,
)
#: At level ``hvd`` too; the imports last, as they depend on which names are still used.
RULES_OF_ALL_LEVELS = (report_surroundings, change_imports)
