"""A shell script that submits the stages of a recipe to SLURM, one array of jobs for each level of dependencies.

Options of job arrays: https://slurm.schedmd.com/job_array.html
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

_SCRIPT = """#!/bin/bash
# Submits a recipe to SLURM: `bash FILE --time=4:00:00 --gpus=1`; options go to sbatch. Finished stages are kept, so
# submit it again after a failure.
set -e
cd {folder}
mkdir -p {logs}
command={command}
options=(--job-name={name} --output={logs}/%x-%A-%a.log "$@")
submit() {{
    job=$(sbatch --parsable --array="0-$(($# - 1))" ${{job:+"--dependency=afterany:$job"}} "${{options[@]}}" <<END
#!/bin/bash
stages=($@)
exec $command --only "\\${{stages[\\$SLURM_ARRAY_TASK_ID]}}"
END
    )
    job=${{job%%;*}}
}}
"""


def levels(needs: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Stages by the length of the longest chain of stages that each needs; those of a level are independent.

    `needs` has for each stage the earlier ones whose outputs it reads, in the recipe's order.
    """
    level, found = dict[str, int](), list[list[str]]()
    for name, earlier in needs.items():
        level[name] = max((level[each] + 1 for each in earlier), default=0)
        if level[name] == len(found):
            found.append([])
        found[level[name]].append(name)
    return found


def submit_script(stages: Sequence[Sequence[str]], command: Sequence[str], name: str, folder: str, logs: str) -> str:
    """The script for `stages` by level; `command` runs the recipe, and gets `--only STAGE`."""
    quoted = {"name": shlex.quote(name), "folder": shlex.quote(folder), "logs": shlex.quote(logs)}
    script = _SCRIPT.format(command=shlex.quote(shlex.join(command)), **quoted)
    return script + "".join(f"submit {shlex.join(level)}\n" for level in stages)
