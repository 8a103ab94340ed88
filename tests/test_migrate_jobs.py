"""``unidist.migrate.jobs``: launches in job scripts, and the torchrun lines that replace them."""

from __future__ import annotations

import random

import pytest

from unidist.migrate.jobs import LaunchLine, find_launches

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
        ("#SBATCH -N 2\nmpirun -np 8 python t.py", f"{several(2, 4, 'FIRSTHOST')} t.py"),
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
