r"""`neve help TOPIC`: what is the same for many commands, each on a screen; a command's own words are its `--help`.

The pages of docs/ have it at length. A test holds what stands here against the commands: each `neve …` and each option
that is named exists, and the lists of formats and exit codes are those of the code.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import NamedTuple

import click


class Topic(NamedTuple):
    """A line for the list, and the page."""

    line: str
    text: str


TOPICS: Mapping[str, Topic] = {
    "environment": Topic(
        "Variables that commands and programs read.",
        r"""
NAMESRV_ADDR       name servers, host:port joined by ;          --namesrv
NEVE_CONTEXT       a cluster by its name                        --context
NEVE_ACCESS_KEY    as whom requests are signed, with
NEVE_SECRET_KEY    its secret; never an argument
NEVE_CREDENTIALS   a file with accessKey: and secretKey:        --credentials
NEVE_TLS           1: connect over TLS                          --tls
NEVE_TLS_CA        whom to trust, PEM                           --tls-ca
NEVE_STORE         the archive's URL, see `neve help stores`    --store
NEVE_ADMIN         a broker's admin port, host:port             --admin
NEVE_CONTEXTS      another file than ~/.config/neve/contexts.json
NEVE_REPLAYS       where `neve replay` notes how far it is      --tasks
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE, ...      of an S3 store

What the command line says goes before the environment, that before the context.
""",
    ),
    "contexts": Topic(
        "Clusters by name.",
        r"""
neve context add prod -n 'ns1:9876;ns2:9876' --credentials ~/prod.yml --tls-ca ~/ca.pem --use
neve context ls
neve context use prod
neve --context test topic list

A context has name servers, TLS, the file with credentials and a store. It holds where neither
the command line nor the environment says something else. Contexts are in
~/.config/neve/contexts.json, without secrets.
""",
    ),
    "exit-codes": Topic(
        "What a command ends with.",
        r"""
0    done
1    failed
2    wrong usage
3    not found: a topic, group, message, broker
4    not allowed: no user, a wrong secret, no right
5    conflict: members are connected, it is there already
6    unreachable: name server, broker or store
7    fewer messages than --count asked for
130  interrupted

Servers (`neve broker`, `neve namesrv`, `neve controller`, `neve up`) end with:

0    stopped as asked
2    a key or value of the configuration, or of the command line
3    a port or the data directory is in use
4    too little room on the disk
5    the archive: unreachable at the first start, a right is missing, or it is another's
6    anything else: a damaged log, a disk that failed
143  second signal

Data goes to stdout, messages to stderr.
""",
    ),
    "formats": Topic(
        "How messages are printed, and read.",
        r"""
neve consume orders                        bodies, a line each
neve consume orders -D '\0'                another byte behind each body
neve consume orders -o json                a JSON line with everything
neve consume orders -F '%q:%o %k %s\n'     a format:

%s  body                    %S  its length in bytes      %R  the same as four bytes
%k  keys, with spaces       %K  their length
%h  application's properties, NAME=VALUE,...             %H  all properties
%t  topic    %q %p  queue   %o  offset    %b  broker     %g  tags    %i  message id
%T  stored, ms since 1970   %D  stored, ISO 8601         %B  sent, ms since 1970
%%  a per cent sign         escapes: \n \t \0 \xHH; nothing is put behind a format

neve produce orders --json      reads what -o json wrote: tags, keys, properties and the bytes
                                of the body

Commands that list have -o json, too.
""",
    ),
    "migration": Topic(
        "From Apache RocketMQ to neve.",
        r"""
Side by side     a neve broker under Apache's name server; producers leave the old one with
                 `neve broker wipe-write`, and consumers read it dry
By its file      neve broker -c broker.conf takes Apache's; `neve doctor -c broker.conf` says
                 what is honoured, what is not and what to write instead
By its directory neve broker --import-from DIR -c broker.conf: of a broker that is stopped or
                 was killed: messages, topics, groups, positions, what is delayed or half
By following     brokerRole=SLAVE: a running master's log is copied, then its place taken
A copy           neve export DIR, neve import DIR: topics, groups and messages, to any cluster

docs/migration.md has each step by step, and what it keeps.
""",
    ),
    "stores": Topic(
        "URLs of an archive.",
        r"""
dir:PATH                                            a directory
s3://BUCKET/PREFIX?region=NAME                      S3
s3://BUCKET/PREFIX?endpoint=http://HOST:PORT&region=NAME    MinIO and others

Credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or the machine's
role, never from the URL. The store has to honour If-None-Match: * on PUT:

neve doctor --store URL       tries each request of an archive, multipart uploads included
neve archive ls --store URL   what is in it, without a broker
""",
    ),
    "times": Topic(
        "Times and spans.",
        r"""
2026-01-31T08:00          ISO 8601; without a zone it is UTC
2026-01-31T08:00+01:00
-90m                      so long before now: s, m, h, d
720h, 30d, forever        a span, as `neve topic ttl set` takes it

neve consume orders --from -1h --to -10m      by the time of storing, the end excluded
neve group reset billing --to-time -1h        where a group goes on
""",
    ),
    "ttl": Topic(
        "How long messages are kept.",
        r"""
neve topic ttl set orders 720h     on both tiers: the local disk and the archive
neve topic ttl plan orders         what would go

Readers lose sight of an archived message when its time is over; its object is deleted
expireGrace (a day) after that, and until then `neve archive unexpire` brings it back.
Without a TTL of its own a topic has defaultTtlHours, which is for ever.
""",
    ),
    "watching": Topic(
        "Health, metrics, what is wrong.",
        r"""
curl http://127.0.0.1:10913/readyz         what a broker can't do now: since when, why, what
                                           it means, what comes by itself
curl http://127.0.0.1:10913/metrics        for Prometheus; conf/prometheus-rules.yml has alarms,
                                           conf/grafana two boards
neve broker describe NAME                  the same conditions, from anywhere
neve group lag GROUP                       what a group has left to read
curl http://127.0.0.1:10913/archive/status what is archived, jobs, errors

metricsExporterType=PROM serves RocketMQ's own metrics as well; name servers and controllers
have an adminPort, too, off by default.
""",
    ),
}


@click.command("help")
@click.argument("topic", required=False)
def help_(topic: str | None) -> None:
    """Print a page that several commands share; without TOPIC: which there are."""
    if topic is None:
        formatter = click.HelpFormatter(max_width=100)
        formatter.write_dl([(name, one.line) for name, one in TOPICS.items()])
        click.echo(f"{formatter.getvalue()}\nneve help TOPIC; `neve COMMAND --help` for a command.")
        return
    found = TOPICS.get(topic)
    if found is None:
        near = difflib.get_close_matches(topic, TOPICS, 1)
        meant = f"; do you mean {near[0]}?" if near else ""
        raise click.UsageError(f"no page {topic!r}{meant} There are: {', '.join(TOPICS)}")
    click.echo(f"{found.line}\n{found.text}", nl=False)
