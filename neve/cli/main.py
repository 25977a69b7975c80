"""`neve`: finds the command, loads only its module, and turns errors into exit codes.

    0 done · 1 failed · 2 wrong usage · 3 not found · 4 not allowed · 5 conflict · 6 unreachable · 7 fewer
    messages than --count · 130 interrupted

Data goes to stdout, messages to stderr. `neve --help` prints the table below without loading a command.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    from typing_extensions import override
else:

    def override(method: Any) -> Any:
        return method


# The key of the context of the running command in `Context.meta`.
CONTEXT_META = "neve.context"


class Verb(NamedTuple):
    """The place of a command (`module:name`, empty for one that an entry point adds), and its line in the help."""

    home: str
    help: str


VERBS: Mapping[str, Verb] = {
    "acl": Verb("neve.cli.acl:acl", "Policies: what users may do."),
    "archive": Verb("neve.cli.archive:archive", "The archive: list, verify, offload, compact, erase."),
    "bench": Verb("neve.cli.bench:bench", "Measure a cluster: sends, reads, end-to-end latency."),
    "broker": Verb("neve.cli.broker:broker", "Run a broker; show and change a running one."),
    "broker-set": Verb("neve.cli.broker_set:broker_set", "Broker sets: masters, members, elections, switchover."),
    "cluster": Verb("neve.cli.cluster_overview:cluster", "Clusters: name servers, brokers, members."),
    "completion": Verb("neve.cli.completion:completion", "Print the completion script for bash, zsh or fish."),
    "consume": Verb("neve.cli.consume:consume", "Print the messages of a topic."),
    "context": Verb("neve.cli.context:context", "Named connection settings: list, create, use, delete."),
    "controller": Verb("", "Run a controller, which elects the masters of broker sets."),
    "demo": Verb("neve.demo.command:demo", "Try all of neve on real flights, and compare the results."),
    "doctor": Verb("neve.cli.doctor:doctor", "Check this machine, a store, a broker's configuration."),
    "export": Verb("neve.cli.export:export_topics", "Write topics, groups and committed offsets to a directory."),
    "group": Verb("neve.cli.group:group", "Consumer groups: members, lag, committed offsets."),
    "help": Verb("neve.cli.help:help_", "Pages: formats, times, stores, contexts, exit codes, ..."),
    "import": Verb("neve.cli.export:import_topics", "Send an export to a cluster."),
    "message": Verb("neve.cli.message:message", "Single messages: show, trace, send again."),
    "migrate": Verb("neve.cli.migrate:migrate", "Copy topics, groups and committed offsets to another broker."),
    "namesrv": Verb("", "Run a name server."),
    "produce": Verb("neve.cli.produce:produce", "Send one message, the lines of stdin, or files."),
    "spark": Verb("neve.cli.spark:spark", "Query archived topics with Spark."),
    "dlq": Verb("neve.cli.dlq:dlq", "Dead letters of consumer groups: list, show, redrive."),
    "replay": Verb("neve.cli.replay:replay", "Send the messages of a topic again, to another topic."),
    "topic": Verb("neve.cli.topic:topic", "Topics: list, show, create, set, delete, trim; their TTL."),
    "user": Verb("neve.cli.user:user", "Users: list, create, set, delete."),
    "top": Verb("neve.cli.top:top", "Live traffic by topic, group and tier."),
    "up": Verb("", "Run a name server and a broker for development."),
}


_ENTRY_POINTS = "neve.commands"


class LazyGroup(click.Group):
    """A group that imports a command only when it is used."""

    def __init__(self, *args: Any, verbs: Mapping[str, Verb], entry_points: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._verbs = verbs
        self._entry_points = entry_points

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self._verbs, *super().list_commands(ctx)})

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = self._verbs.get(cmd_name)
        if verb is not None and verb.home:
            return _load(verb.home)
        found = super().get_command(ctx, cmd_name)
        if found is not None or self._entry_points is None:
            return found
        return _joined(self._entry_points, cmd_name, verb)

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, self._verbs[name].help) for name in self.list_commands(ctx) if name in self._verbs]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def joined(name: str) -> click.Command:
    """Return the command of this name that the server packages add.

    Raises:
        click.UsageError: the server packages are not installed.
    """
    command = _joined(_ENTRY_POINTS, name, VERBS[name])
    assert command is not None
    return command


def _joined(group: str, name: str, known: Verb | None) -> click.Command | None:
    from importlib.metadata import entry_points

    from neve.server_packages import make_importable

    make_importable()
    for entry in entry_points(group=group, name=name):
        try:
            command = entry.load()
        except ModuleNotFoundError as missing:
            raise click.UsageError(
                f"`neve {name}` needs the server's packages, {missing.name} is missing: {_install()}"
            ) from missing
        return command if isinstance(command, click.Command) else None
    if known is not None:
        raise click.UsageError(f"`neve {name}` is not part of this install: {_install()}")
    return None


def _install() -> str:
    from neve.extras import install_command

    return install_command("server")


def _load(home: str) -> click.Command:
    module, _, name = home.partition(":")
    command = getattr(import_module(module), name)
    if not isinstance(command, click.Command):
        raise TypeError(f"{home} is not a command")
    return command


def _version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(version("neve"))
        ctx.exit()


def _choose_context(context: click.Context, _param: click.Parameter, name: str | None) -> None:
    """Store the name for the defaults of the command's options."""
    if name is not None:
        context.meta[CONTEXT_META] = name


@click.group(
    cls=LazyGroup,
    verbs=VERBS,
    entry_points=_ENTRY_POINTS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--context",
    envvar="NEVE_CONTEXT",
    show_envvar=True,
    expose_value=False,
    callback=_choose_context,
    metavar="NAME",
    help="Use this context, see `neve context`.",
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Print the version."
)
def neve() -> None:
    """A RocketMQ message broker with tiered storage.

    Name servers come from --namesrv, NAMESRV_ADDR or the context; credentials of a cluster from NEVE_ACCESS_KEY and
    NEVE_SECRET_KEY or a file; credentials of an object store from the AWS variables or profile.

    Data goes to stdout, messages to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not found, 4 not allowed,
    5 conflict, 6 unreachable, 7 fewer messages than --count asked for; the servers have their own
    (docs/deploy/production.md).
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point; never returns."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        given = None if arguments is None else list(arguments)
        done = neve.main(args=given, prog_name="neve", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.exceptions.Exit as error:
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except BrokenPipeError:
        # the reader of our output closed it (`| head`): no message is needed
        sys.stderr.close()
        return 1
    except Exception as error:
        from neve.cli.failures import explain

        explained = explain(error)
        if explained is None:
            raise
        click.echo(f"error: {explained.text}", err=True)
        return explained.exit_code
    return done if isinstance(done, int) else 0
