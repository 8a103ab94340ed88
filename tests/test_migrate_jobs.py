"""``unidist.migrate.jobs``: launches in job scripts, and the torchrun lines that replace them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.worlds import ROOT
from unidist.migrate.files import FileKind
from unidist.migrate.job_report import job_remarks
from unidist.migrate.jobs import LaunchLine, Surroundings, find_launches
from unidist.migrate.project import Exports, migrate_files

pytestmark = pytest.mark.unit
ONE = "torchrun --standalone --nproc-per-node"


def several(nodes: int | str, processes: int | str, first: str) -> str:
    return f"torchrun --nnodes {nodes} --nproc-per-node {processes} --rdzv-backend c10d --rdzv-endpoint {first}:29500"


def only(text: str) -> LaunchLine:
    launches = find_launches(text)
    assert len(launches) == 1, launches
    return launches[0]


@pytest.mark.parametrize(
    ("command", "torchrun"),
    [
        ("horovodrun -np 4 python train.py", f"{ONE} 4 train.py"),
        ("horovodrun --num-proc 4 python3 train.py", f"{ONE} 4 train.py"),
        ("horovodrun --num-proc=4 python3.11 train.py", f"{ONE} 4 train.py"),
        ("horovodrun -np 4 -H localhost:4 python -u train.py --lr 0.1", f"{ONE} 4 train.py --lr 0.1"),
        ("horovodrun --gloo --verbose --start-timeout 60 -p 22 -np 2 python t.py", f"{ONE} 2 t.py"),
        ("horovodrun --mpi --log-level=INFO --disable-cache -np 2 python t.py", f"{ONE} 2 t.py"),
        ("horovodrun -np 2 ./train.py -v", f"{ONE} 2 ./train.py -v"),
        ("horovodrun -np 2 python -m pkg.train --epochs 3", f"{ONE} 2 -m pkg.train --epochs 3"),
        ("horovodrun -np 2 python -u -m pkg.train", f"{ONE} 2 -m pkg.train"),
        ("horovodrun -np 2 python -um pkg.train", f"{ONE} 2 -m pkg.train"),
        ("/usr/bin/mpirun -np 2 python t.py", f"{ONE} 2 t.py"),
        ("mpirun.openmpi --np 2 python t.py", f"{ONE} 2 t.py"),
        ("mpiexec -n 2 python t.py", f"{ONE} 2 t.py"),
        ("mpirun --oversubscribe --allow-run-as-root --bind-to none -map-by slot -np 2 python t.py", f"{ONE} 2 t.py"),
        ("mpirun -np 2 -mca pml ob1 --mca btl ^openib python t.py", f"{ONE} 2 t.py"),
        ("mpirun -np 2 -x NCCL_DEBUG=INFO -x PATH python t.py", f"NCCL_DEBUG=INFO {ONE} 2 t.py"),
        ('mpirun -np 2 -x A="b c" python t.py', f'A="b c" {ONE} 2 t.py'),
        ('mpirun -np 2 -x "A=b c" python t.py', f'env "A=b c" {ONE} 2 t.py'),
        ("mpiexec -genvall -genv A 1 -env B=2 -n 2 python t.py", f"A=1 B=2 {ONE} 2 t.py"),
        ("mpirun -np 4 -npernode 4 python t.py", f"{ONE} 4 t.py"),
        ("mpirun -np 4 --map-by ppr:4:node python t.py", f"{ONE} 4 t.py"),
        ("A=b horovodrun -np 2 python t.py", f"A=b {ONE} 2 t.py"),
        ("exec horovodrun -np 2 python t.py", f"exec {ONE} 2 t.py"),
        ("time nohup horovodrun -np 2 python t.py", f"time nohup {ONE} 2 t.py"),
        ("exec mpirun -x A=1 -np 2 python t.py", f"exec env A=1 {ONE} 2 t.py"),
        ("singularity exec --nv img.sif horovodrun -np 2 python t.py", f"singularity exec --nv img.sif {ONE} 2 t.py"),
        ("docker run -it img:1 mpirun -np 2 python t.py", f"docker run -it img:1 {ONE} 2 t.py"),
        ("kubectl exec pod -- horovodrun -np 2 python t.py", f"kubectl exec pod -- {ONE} 2 t.py"),
        ("horovodrun -np $N python t.py", f"{ONE} $N t.py"),
        ('horovodrun -np "${NODES}" python t.py "$@"', f'{ONE} "${{NODES}}" t.py "$@"'),
        ("horovodrun -np $((NODES * 4)) python t.py", f"{ONE} $((NODES * 4)) t.py"),
        ("horovodrun -np $(nproc --all) python t.py", f"{ONE} $(nproc --all) t.py"),
        ("horovodrun -np 2 -H localhost:$N python t.py", f"{ONE} 2 t.py"),
        ("""horovodrun -np 2 python t.py 'a  b' "c \\"d\\"" e\\ f""", f"""{ONE} 2 t.py 'a  b' "c \\"d\\"" e\\ f"""),
        ("horovodrun  -np\t2   python   t.py   --a   1", f"{ONE} 2 t.py   --a   1"),
        ("horovodrun -np 2 python t.py >log 2>&1", f"{ONE} 2 t.py >log 2>&1"),
        ("horovodrun -np 2 python t.py &> log", f"{ONE} 2 t.py &> log"),
        ("horovodrun -np 2 python t.py > >(tee log)", f"{ONE} 2 t.py > >(tee log)"),
        ("horovodrun -np 2 python $SCRIPT ${ARGS[@]}", f"{ONE} 2 $SCRIPT ${{ARGS[@]}}"),
        ("horovodrun -np 2 python t.py --tag a#b", f"{ONE} 2 t.py --tag a#b"),
    ],
)  # fmt: skip
def test_one_host(command: str, torchrun: str) -> None:
    assert only(command) == LaunchLine(1, command, torchrun, ())
    assert only(f"set -e\n  {command}\n").line == 2


@pytest.mark.parametrize(
    ("command", "torchrun", "words"),
    [
        ("horovodrun -np 8 -H a:4,b:4 python t.py", f"{several(2, 4, 'a')} t.py", "each of a, b"),
        ("horovodrun -np 8 --hosts=10.0.0.1:4,b:4 python t.py", f"{several(2, 4, '10.0.0.1')} t.py", "srun --nodes=2"),
        ("mpirun -np 4 -H a,b,a,b python t.py", f"{several(2, 2, 'a')} t.py", "each of a, b"),
        ("mpirun -np 8 -H a,b python t.py", f"{several(2, 4, 'a')} t.py", "each of a, b"),
        ("mpirun -H a:2,b:2 python t.py", f"{several(2, 2, 'a')} t.py", "each of a, b"),
        ("mpirun -H a,b,c -N 2 python t.py", f"{several(3, 2, 'a')} t.py", "each of a, b, c"),
        ("mpiexec -hosts a,b -ppn 2 -n 4 python t.py", f"{several(2, 2, 'a')} t.py", "each of a, b"),
        ("mpirun -np 4 -H a:2,b:2 -x PATH python t.py", f"{several(2, 2, 'a')} t.py", "set on every host: PATH"),
        ("horovodrun -np $N -H a:$S,b:$S python t.py", f"{several(2, '$S', 'a')} t.py", "-np $N is assumed to be"),
        ("horovodrun -np 4 -H a:4,b:4 python t.py", f"{ONE} 4 t.py", "hosts not needed for 4 processes: b"),
        ("horovodrun -np 4 -H worker-1:4 python t.py", f"{ONE} 4 t.py", "start it on worker-1"),
        ("horovodrun -np 2 bash run.sh x", f"{ONE} 2 --no-python bash run.sh x", "rank starts bash"),
        ("mpirun -np 2 singularity exec i python t.py", f"{ONE} 2 --no-python singularity exec i python t.py", "singu"),
        ("horovodrun -np 2 python -O t.py", f"{ONE} 2 --no-python python -O t.py", "option -O"),
        ("horovodrun -np 2 /opt/bin/python t.py", f"{ONE} 2 t.py", "the torchrun of /opt/bin/python"),
        ("horovodrun -np 2 $PYTHON t.py", f"{ONE} 2 t.py", "the torchrun of $PYTHON"),
        ("mpirun $MPI_OPTS -np 2 python t.py", f"{ONE} 2 t.py", "check the options in $MPI_OPTS"),
        ("horovodrun -np 2 --timeline-filename /t.json python t.py", f"{ONE} 2 t.py", "HOROVOD_TIMELINE"),
        ("horovodrun -np 2 --fusion-threshold-mb=32 python t.py", f"{ONE} 2 t.py", "HOROVOD_FUSION_THRESHOLD"),
        ("horovodrun -np 2 --cycle-time-ms 3.5 python t.py", f"{ONE} 2 t.py", "dropped: --cycle-time-ms 3.5"),
        ("horovodrun -np 2 --autotune --autotune-log-file f python t.py", f"{ONE} 2 t.py", "dropped: --autotune-log"),
        ("horovodrun -np 2 --network-interfaces eth0,eth1 python t.py", f"{ONE} 2 t.py", "SOCKET_IFNAME"),
        ("horovodrun -np 2 --output-filename out python t.py", f"{ONE} 2 t.py", "--log-dir"),
        ("horovodrun -np 2 --mpi-args='-x A=1' python t.py", f"{ONE} 2 t.py", "dropped: --mpi-args='-x A=1'"),
        ("mpirun -np 2 --bind-to core python t.py", f"{ONE} 2 t.py", "binds no process"),
    ],
)  # fmt: skip
def test_with_notes(command: str, torchrun: str, words: str) -> None:
    launch = only(command)
    assert launch.torchrun == torchrun
    assert words in "\n".join(launch.notes)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("horovodrun -np 6 -H a:4,b:4 python t.py", f"on b: {several(2, 2, 'a')} t.py"),
        ("horovodrun -np 6 -H a:4,b:2 python t.py", f"on a: {several(2, 4, 'a')} t.py"),
        ("horovodrun -np 9 -H a:4,b:4 python t.py", "9 processes on 8 slots"),
        ("horovodrun -np 8 -H $HOSTS python t.py", f"{several('NODES', 'PROCESSES', 'FIRSTHOST')} t.py"),
        ("horovodrun -np 8 -H $(cat hosts | tr '\\n' ,) python t.py", "the hosts are in $(cat hosts | tr '\\n' ,)"),
        ("horovodrun -np 8 --hostfile hosts.txt python t.py", "the hosts are in hosts.txt"),
        ("mpirun -np 8 -npernode 4 python t.py", f"{several(2, 4, 'FIRSTHOST')} t.py"),
        ("mpirun -machinefile m -ppn 4 python t.py", f"{several('NODES', 4, 'FIRSTHOST')} t.py"),
        ("mpirun python t.py", "the number of processes is not in the command"),
        ("horovodrun python t.py", "the number of processes is not in the command"),
        ("#PBS -l nodes=3:ppn=4\nmpirun python t.py", f"{several(3, 'PROCESSES', 'FIRSTHOST')} t.py"),
        ("horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./d.sh python t.py", "elastic"),
        ("horovodrun --check-build", "starts no training"),
        ("horovodrun -np 2", "it starts no program"),
        ("horovodrun -np", "has no value"),
        ("horovodrun -np 2 --unheard-of python t.py", "--unheard-of is not known"),
        ('horovodrun -np 2 "$@"', 'the program is in "$@"'),
        ("horovodrun -np 2 $CMD --lr 1", "the program is in $CMD"),
        ("horovodrun -np 2 python - < t.py", "standard input"),
        ("mpirun -np 2 python <<EOF\nprint(1)\nEOF", "standard input"),
        ("mpirun -np 1 python a.py : -np 3 python b.py", "several programs"),
        ("horovodrun -np 2 >log python t.py", "move it to the end"),
        ('horovodrun -np 2 python t.py "oops', "not closed"),
        ("horovodrun -np $(cat n python t.py", "not closed"),
        ("X=$(horovodrun -np 2 python t.py", "not closed"),
        ("mpirun -np 2 python t.py 'oops", "not closed"),
    ],
)
def test_without_one_line(command: str, words: str) -> None:
    launch = only(command)
    assert launch.torchrun is None
    assert words in "\n".join(launch.notes)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# horovodrun -np 2 python t.py",
        "python t.py  # was: horovodrun -np 2 python t.py",
        "echo horovodrun -np 2 python t.py",
        'echo "horovodrun -np 2 python t.py"',
        "which horovodrun && command -v mpirun",
        "pip install horovodrun-tools",
        "mpirun -np 2 ./a.out",
        "mpirun -np 2 bash run.sh",
        "cat > job.sh <<EOF\nhorovodrun -np 2 python t.py\nEOF",
        "cat <<-'END'\n\thorovodrun -np 2 python t.py\n\tEND\n",
        "cat <<EOF\nhorovodrun -np 2 python t.py\n",
        "torchrun --nproc-per-node 2 t.py",
        "echo 'it is not closed\nmpirun ./a.out\n",
    ],
)
def test_no_launch(text: str) -> None:
    assert find_launches(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "if {}; then echo ok; fi",
        "if ! {}\nthen exit 1; fi",
        "for lr in 1 2; do {}; done",
        "cd work && {}",
        "cd work; {} | tee log",
        "{} || exit 1",
        "{} &\nwait",
        "( {} )",
        "run() {{ {}; }}",
        "case $1 in\n  train) {} ;;\nesac",
        "OUT=$({})",
        'echo "$({})"',
        "OUT=`{}`",
        "COMMAND='{}'",
        'COMMAND="{}"',
        'eval "{}"',
        "docker run img bash -c '{}'",
        "ssh host bash -lc 'cd w && {}'",
        "CMD=({})",
        "bash <<EOF\n{}\nEOF\n",
        "sbatch --nodes=1 <<'EOF'\n#!/bin/bash\n{}\nEOF\n",
        "cat <<EOF\n$x's\nEOF\n{}",
        "cat <<A <<B\n'\nA\n\"\nB\n{}",
        "x=${{y#*'}}'}} # '\n{}",
        "(( x = 1 << 2 ))\n{}",
        "echo don't\n{}",
        "f $(\n{}",
        'ssh host "cd w && {}"',
        'export COMMAND="{}"',
        'cat <<< "$x"\n{}',
        "until {}; do sleep 1; done",
        "echo $((1 + 2)) ${{x:-'}}'}}\n{}",
    ],
)
def test_anywhere_in_code(text: str) -> None:
    command = "horovodrun -np 2 python t.py --a b"
    launch = only(text.format(command))
    assert (launch.command, launch.torchrun) == (command, f"{ONE} 2 t.py --a b")
    assert text.format(command).splitlines()[launch.line - 1].count(command) == 1


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_command_over_several_lines(newline: str) -> None:
    lines = [
        "#!/bin/bash",
        "",
        "mpirun -np 8 \\",
        "    -H a:4,b:4 -x NCCL_DEBUG=INFO \\",
        "\t-bind-to none \\",
        "    python   train.py \\",
        "    --name 'two",
        "lines' --lr 0.1",
        "horovodrun -np 2 python t.py",
    ]
    first, second = find_launches(newline.join(lines))
    assert (first.line, second.line) == (3, 9)
    program = "train.py --name 'two\nlines' --lr 0.1"
    assert first.command == f"mpirun -np 8 -H a:4,b:4 -x NCCL_DEBUG=INFO -bind-to none python   {program}"
    assert first.torchrun == f"NCCL_DEBUG=INFO {several(2, 4, 'a')} {program}"


def test_an_array_over_several_lines() -> None:
    launch = only("CMD=(horovodrun -np 4  # all\n    -H localhost:4\n    python t.py)\n")
    assert launch == LaunchLine(1, "horovodrun -np 4 -H localhost:4 python t.py", f"{ONE} 4 t.py", ())


def test_a_syntax_error_costs_its_own_lines_alone() -> None:
    text = (
        'if true; then\n  horovodrun -np 2 python a.py\n  mpirun -np 2 python "b.py\n\nhorovodrun -np 2 python c.py\n'
    )
    found = find_launches(text)
    assert [(launch.line, launch.torchrun) for launch in found] == [
        (2, f"{ONE} 2 a.py"),
        (3, None),
        (5, f"{ONE} 2 c.py"),
    ]


def test_nothing_raises() -> None:
    draw = random.Random(1)
    pieces = [
        *"'\"`\\#;|&(){}<>\n \t$",
        "$(",
        "${",
        "$((",
        "))",
        "<<A\n",
        "A\n",
        "\\\n",
        "<(",
        "horovodrun ",
        "mpirun ",
        "-np ",
        "2 ",
        "0 ",
        "²",
        "python ",
        "t.py ",
        "bash -c ",
        "eval ",
        "-H ",
        "a:2,b ",
        "-ppn 0 ",
        "-x ",
        "=",
        ":",
        "--hosts=",
        "-np=",
    ]
    for _ in range(3000):
        for launch in find_launches("".join(draw.choices(pieces, k=draw.randint(1, 40)))):
            assert launch.torchrun or launch.notes
    for deep in ("$(", '"${', "(", "`", "bash <<A\n", "eval \"eval '", "x=$(\n", "horovodrun \\\n"):
        find_launches(deep * 1000)


# ------------------------------------------------------------------------------------ what surrounds a launch line
NODES = (
    "srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 torchrun --nnodes $SLURM_NNODES --nproc-per-node {} "
    '--rdzv-backend c10d --rdzv-endpoint "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):29500" t.py'
)


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("horovodrun -np $SLURM_NTASKS -H $hosts python t.py --a 1", "srun python t.py --a 1"),
        ("mpirun -np ${SLURM_NTASKS} -x A=1 python -u t.py", "A=1 srun python -u t.py"),
        ("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\nmpirun -np 8 python t.py", "srun python t.py"),
        ("#SBATCH -N 2 -n 8\nmpirun -np 8 python t.py", "srun python t.py"),
        ("#SBATCH -N 2\nmpirun -np 8 python t.py", NODES.format(4)),
        ("#SBATCH -N 4\n#SBATCH --ntasks-per-node=1\nhorovodrun -np 32 --hostfile h python t.py", NODES.format(8)),
        ("horovodrun -np $N -H $SLURM_HOSTS python t.py", NODES.format("PROCESSES")),
        ("#SBATCH --gres=gpu:4\nhorovodrun -np 4 python t.py", f"{ONE} 4 t.py"),
        (
            "A=1 singularity exec --nv i.sif horovodrun -np $SLURM_NTASKS -H `cat h` python t.py",
            "A=1 srun singularity exec --nv i.sif python t.py",
        ),
        (
            "#SBATCH -N 2\nexec docker run img mpirun -np 8 python t.py",
            "exec " + NODES.format(4).replace(" torchrun", " docker run img torchrun"),
        ),
        ("HOSTS=a:4,b:4\nhorovodrun -np 8 -H $HOSTS python t.py", f"{several(2, 4, 'a')} t.py"),
        ('export HOSTS="localhost:4"\nhorovodrun -np 4 -H "${HOSTS}" python t.py', f"{ONE} 4 t.py"),
    ],
)  # fmt: skip
def test_the_script_around_it(script: str, line: str) -> None:
    assert only(script).torchrun == line


def test_what_is_beside_the_script() -> None:
    """Scripts that stay on Horovod's calls start on the drop-in; files of hosts are read."""
    stays = {"old.py": True, "pkg.old": True, "new.py": False}
    files = {"hosts": "# two\na slots=4\nb slots=4 max_slots=8\n", "plain": "a:2\nb:2\n", "odd": "$x\n"}
    around = Surroundings(stays.get, lambda script: script == "elastic.py", files.get)

    def line(command: str) -> LaunchLine:
        return find_launches(command, around)[0]

    assert line("horovodrun -np 2 python -u old.py --a").torchrun == f"{ONE} 2 -m unidist.hvd old.py --a"
    assert line("horovodrun -np 2 ./old.py").torchrun == f"{ONE} 2 ./old.py"  # under another name, not found
    assert line("horovodrun -np 2 python -m pkg.old").torchrun == f"{ONE} 2 -m unidist.hvd -m pkg.old"
    assert line("horovodrun -np 2 python new.py") == LaunchLine(
        1, "horovodrun -np 2 python new.py", f"{ONE} 2 new.py", ()
    )
    assert "-m unidist.hvd before /x/t.py if it still" in line("horovodrun -np 2 python /x/t.py").notes[0]
    assert line("mpirun -np $SLURM_NTASKS python -u old.py").torchrun == "srun python -u -m unidist.hvd old.py"
    assert line("mpirun -np 8 -hostfile missing python old.py").torchrun == (
        "mpirun -np 8 -hostfile missing python -m unidist.hvd old.py"
    )
    missing = line("horovodrun -np 8 --hostfile missing python old.py")
    assert missing.torchrun is None and missing.notes[-1] == (
        "or, with Open MPI, from here: mpirun -np 8 --hostfile missing --bind-to none --map-by slot "
        "python -m unidist.hvd old.py"
    )
    for name, each in (("hosts", 4), ("plain", 2)):
        found = line(f"horovodrun -np {2 * each} --hostfile {name} python new.py")
        assert found.torchrun == f"{several(2, each, 'a')} new.py"
    assert "the hosts are in odd" in line("horovodrun -np 8 --hostfile odd python new.py").notes
    assert "uses hvd.elastic" in line("horovodrun -np 8 python elastic.py").notes[0]


# ------------------------------------------------------------------------------------ other files
MPI_JOB = """apiVersion: kubeflow.org/v2beta1
kind: MPIJob
spec:
  slotsPerWorker: 1
  mpiReplicaSpecs:
    Launcher:
      template:
        spec:
          containers:
          - image: horovod/horovod:0.28.1
            name: mpi-launcher
            command:
            - {launcher}
            args:
            - -np
            - "2"  # of them
            - -x
            - LD_LIBRARY_PATH

            - python
            - /examples/train.py
            resources:
              limits: {{cpu: 1}}
"""
OPERATOR = "keep it; or kind: PyTorchJob, whose operator sets torchrun's options: torchrun train.py"
IMAGE = "an image with PyTorch, and pip install unidist-torch"
BUILD = "remove it with Horovod"


@pytest.mark.parametrize(
    ("what", "text", "found"),
    [
        ("yaml", MPI_JOB.format(launcher="mpirun"), [(2, OPERATOR), (10, IMAGE), (12, "keep it")]),
        (
            "yaml",
            'kind: MPIJob\nspec:\n  - command: ["horovodrun", "-np", "$(N)", "python",\n      "t.py"]\n    image: x\n',
            [
                (1, OPERATOR),
                (3, '["mpirun", "-np", "$(N)", "--bind-to", "none", "--map-by", "slot", "python", "t.py"]'),
            ],
        ),
        (
            "yaml",
            "services:\n  a:\n    command: horovodrun -np 2 -H localhost:2 python t.py\n      --lr 0.1\n"
            '  b:\n    entrypoint: ["bash", "-lc", "mpirun -np 4 python t.py"]\n    image: redis\n',
            [(3, f"{ONE} 2 t.py --lr 0.1"), (6, f"{ONE} 4 t.py")],
        ),
        (
            "yaml",
            "command: >-\n  horovodrun -np {{ .Values.n }}\n  python t.py\n  --epochs ${{inputs.epochs}}\n"
            "distribution:\n  type: mpi\n",
            [(2, f"{ONE} {{{{ .Values.n }}}} t.py --epochs ${{{{inputs.epochs}}}}")],
        ),
        (
            "yaml",
            "train:\n  script:\n    - pip install horovod==0.28\n    - horovodrun -np 2 python a.py\n"
            "    - |\n      cd w\n      mpirun -np 2 \\\n        python b.py\n    - echo horovodrun\n",
            [(3, "- pip install unidist-torch"), (4, f"{ONE} 2 a.py"), (7, f"{ONE} 2 b.py")],
        ),
        (
            "yaml",
            "name: horovod\ndependencies:\n  - python=3.8\n  - conda-forge::horovod=0.28\n  - pip:\n"
            "    - horovod[pytorch]==0.22.1\n    - horovodrun-tools\n",
            [(4, "- conda-forge::unidist-torch"), (6, "- unidist-torch")],
        ),
        (
            "json",
            '{\n  "image": "x.amazonaws.com/horovod:latest",\n  "command": ["mpirun", "-np", "2", "python", "t.py"],\n'
            '  "other": "cd /w && horovodrun -np 4 python t.py --name \\"a b\\"",\n  "framework": "horovod"\n}\n',
            [
                (2, IMAGE),
                (3, '["torchrun", "--standalone", "--nproc-per-node", "2", "t.py"]'),
                (4, f'{ONE} 4 t.py --name "a b"'),
            ],
        ),
        (
            "dockerfile",
            "FROM horovod/horovod:0.28.1\nENV HOROVOD_GPU_OPERATIONS=NCCL \\\n    PATH=/x\n# pip install horovod\n"
            "RUN HOROVOD_WITH_PYTORCH=1 pip install --no-cache-dir horovod[pytorch]==0.28.1\nRUN ldconfig && \\\n"
            '    pip3 install "horovod>=0.22" && \\\n    ldconfig\nENTRYPOINT ["horovodrun", \\\n  "-np", "4"]\n'
            'CMD ["python", "/app/t.py"]\nRUN mpirun -np 2 python t.py\n',
            [
                (1, IMAGE),
                (2, BUILD),
                (5, "RUN pip install --no-cache-dir unidist-torch"),
                (7, 'pip3 install "unidist-torch" && \\'),
                (9, '["torchrun", "--standalone", "--nproc-per-node", "4", "/app/t.py"]'),
                (12, f"{ONE} 2 t.py"),
            ],
        ),
        (
            "makefile",
            "NP ?= 4\ntrain: deps  # by horovodrun\n\t@horovodrun -np $(NP) python t.py \\\n\t\t--data $$DATA\n\n"
            "mpi:\n\t-mpirun -np ${NP} python t.py $$(cat args)\nRUN = horovodrun -np 2 python t.py\n",
            [(3, f"{ONE} $(NP) t.py --data $$DATA"), (7, f"{ONE} $(NP) t.py $$(cat args)"), (8, f"{ONE} 2 t.py")],
        ),
        (
            "requirements",
            "torch\nhorovod[pytorch]>=0.21.0,<0.29  # training\n# horovod\nhorovod\nhorovod-tools\n"
            "-e git+https://github.com/horovod/horovod.git#egg=horovod\n",
            [(2, "unidist-torch  # training"), (4, "unidist-torch"), (6, "unidist-torch")],
        ),
        (
            "requirements",
            '[project]\ndependencies = ["torch", "horovod>=0.28", "tqdm"]\n[x]\nmpi = [\n    "horovod~=0.28",\n]\n'
            '[tool.poetry.dependencies]\nhorovod = {version = "^0.28"}\n[tool.poe.tasks]\n'
            'train = "horovodrun -np 4 python t.py"\n',
            [
                (2, 'dependencies = ["torch", "unidist-torch", "tqdm"]'),
                (5, '"unidist-torch",'),
                (8, 'unidist-torch = "*"'),
                (10, f"{ONE} 4 t.py"),
            ],
        ),
        (
            "shell",
            "pip list\nhorovodrun --check-build\npip install -U torch && pip install horovod[pytorch] --no-cache-dir\n",
            [
                (2, "remove it with Horovod; `unidist doctor` shows what runs here"),
                (3, "pip install -U torch && pip install unidist-torch --no-cache-dir"),
            ],
        ),
        ("text", "Start it so:\nhorovodrun -np 4 python t.py\n", [(2, f"{ONE} 4 t.py")]),
    ],
)  # fmt: skip
def test_other_files(what: FileKind, text: str, found: list[tuple[int, str]]) -> None:
    remarks = job_remarks(Path("x"), text, what, Surroundings())
    assert [
        (each.line, each.remedy) for each in remarks if "horovodrun" not in each.why or each.line in dict(found)
    ] == (found)
    assert all("as it is" not in each.why for each in remarks if "horovodrun" in each.what)


def test_a_project(tmp_path: Path) -> None:
    """Launch lines follow the scripts that they start; what is named outright is read as what it is."""
    files = {
        "train.py": (ROOT / "tests/legacy/plain.py").read_text(),
        "lightning.py": 'trainer = Trainer(strategy="horovod")\n',
        "elastic.py": "import horovod.torch as hvd\n\nstate = hvd.elastic.TorchState()\n",
        "launch.py": (
            '"""Run it by horovodrun -np 2 python launch.py"""\nimport os, subprocess, sys\n\nn = 4\n'
            'subprocess.run(["horovodrun", "-np", str(n), sys.executable, "train.py", f"--lr={0.1 * n}", *sys.argv])\n'
            'os.system(f"horovodrun -np {n} python lightning.py")\nprint("usage: horovodrun -np 2 python x.py")\n'
        ),
        "setup.py": 'from setuptools import setup\n\nsetup(install_requires=["torch", "horovod>=0.22"])\n',
        "jobs/run.sh": (
            "horovodrun -np 4 --hostfile hosts python train.py\nmpirun -np 2 python /app/lightning.py\n"
            "horovodrun -np 2 python elastic.py\nhorovodrun -np 2 python missing.py\n"
        ),
        "jobs/hosts": "a slots=2\nb slots=2\n",
        "Makefile": "clean:\n\trm -rf horovod\n",
        "data.json": '{"command": "horovodrun -np 2 python t.py"}' + " " * 1_000_000,
        "notes": "horovodrun -np 2 python train.py\nit's not Python\n",
        "script": "import horovod.torch as hvd\n\nhvd.init()\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    reports = {
        str(report.path.relative_to(tmp_path)): report
        for report in migrate_files([tmp_path / name for name in files], "native", Exports())
    }
    assert sorted(reports) == sorted({*files} - {"Makefile", "data.json", "jobs/hosts"})
    assert reports["script"].status == "changed" and reports["notes"].status == "unchanged"
    assert reports["notes"].remarks[0].remedy == f"{ONE} 2 train.py"
    assert [(each.line, each.remedy) for each in reports["launch.py"].remarks] == [
        (
            5,
            '[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), "train.py", '
            'f"--lr={0.1 * n}", *sys.argv]',
        ),
        (6, f"{ONE} {{n}} -m unidist.hvd lightning.py"),
    ]
    assert [each.remedy for each in reports["setup.py"].remarks] == [
        'setup(install_requires=["torch", "unidist-torch"])'
    ]
    spread, stays, elastic, missing = reports["jobs/run.sh"].remarks
    assert spread.remedy == f"{several(2, 2, 'a')} train.py" and spread.why.startswith("horovodrun comes with Horovod")
    assert stays.remedy == f"{ONE} 2 -m unidist.hvd /app/lightning.py" and "still imports Horovod" in stays.why
    assert "hvd.elastic" in elastic.why and elastic.remedy == "no single line can replace it"
    assert "-m unidist.hvd before missing.py if it still imports horovod" in missing.why


def test_no_file_raises() -> None:
    draw = random.Random(2)
    pieces = [
        *"\"'\\#|&[]{}<>:,\n \t$-", "\n  ", "- ", "command: ", "args:\n", "RUN ", "CMD [", "horovodrun ", "mpirun",
        "-np ", "2 ", "python ", "t.py", "key: |\n", ": >\n", "{{ x }}", "${{", "horovod", "==1",
        "pip install ", "$$", "\t@",
    ]  # fmt: skip
    kinds: list[FileKind] = ["yaml", "json", "makefile", "dockerfile", "requirements", "text", "shell"]
    for number in range(2100):
        text = "".join(draw.choices(pieces, k=draw.randint(1, 40)))
        for remark in job_remarks(Path("x"), text, kinds[number % 7], Surroundings()):
            assert 1 <= remark.line <= text.count("\n") + 1 and remark.what and remark.why and remark.remedy
