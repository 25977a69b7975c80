r"""`neve help TOPIC`: pages about what many commands share. `--help` describes a single command.

The pages in docs/ have more detail. A test checks that each command and option on these pages exists, and that the
lists of formats and exit codes are those of the code.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import NamedTuple

import click


class HelpPage(NamedTuple):
    """A page, and its line in the list."""

    line: str
    text: str


TOPICS: Mapping[str, HelpPage] = {
    "environment": HelpPage(
        "Variables that commands and programs read.",
        r"""
NAMESRV_ADDR       name servers, host:port joined by ;          --namesrv
NEVE_CONTEXT       context                                      --context
NEVE_ACCESS_KEY    access key that signs requests
NEVE_SECRET_KEY    secret key that signs requests
NEVE_CREDENTIALS   file with accessKey: and secretKey:          --credentials
NEVE_TLS           1: connect over TLS                          --tls
NEVE_TLS_CA        trusted certificates, PEM                    --tls-ca
NEVE_STORE         URL of an archive, see `neve help stores`    --store
NEVE_ADMIN         admin port of a broker, host:port            --admin
NEVE_CONTROLLER    controllers, host:port joined by ;           --controller
NEVE_CONTEXTS      file of contexts, instead of ~/.config/neve/contexts.json
NEVE_REPLAYS       directory with the state of replays          --tasks
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE, ...      credentials of an S3 store

The command line overrides the environment, and the environment overrides the context.
""",
    ),
    "contexts": HelpPage(
        "Named connection settings.",
        r"""
neve context create prod -n 'ns1:9876;ns2:9876' --credentials ~/prod.yml --tls-ca ~/ca.pem --use
neve context list
neve context use prod
neve --context test topic list

A context holds name servers, TLS settings, the name of a credentials file, and a store. It
provides defaults below the command line and the environment. Contexts are in
~/.config/neve/contexts.json, without secrets.
""",
    ),
    "exit-codes": HelpPage(
        "Exit codes of commands and servers.",
        r"""
0    done
1    failed
2    wrong usage
3    not found: a topic, group, message or broker
4    not allowed: unknown user, wrong secret, missing permission
5    conflict: members are connected, or the object exists already
6    unreachable: name server, broker or store
7    fewer messages than --count asked for
130  interrupted

Servers (`neve broker`, `neve namesrv`, `neve controller`, `neve up`) end with:

0    stopped by a signal
2    wrong key or value in the configuration or on the command line
3    a port or the data directory is in use
4    not enough disk space
5    archive: unreachable at the first start, no permission, or owned by another broker
6    other failures: a damaged log, a failed disk
143  second signal

Data goes to stdout, messages to stderr.
""",
    ),
    "formats": HelpPage(
        "How messages are printed and read.",
        r"""
neve consume orders                        one body per line
neve consume orders -D '\0'                another byte after each body
neve consume orders -o json                a JSON line with everything
neve consume orders -F '%q:%o %k %s\n'     a format:

%s  body                    %S  its length in bytes      %R  its length as four bytes
%k  keys, with spaces       %K  their length
%h  application's properties, NAME=VALUE,...             %H  all properties
%t  topic    %q %p  queue   %o  offset    %b  broker     %g  tags    %i  message id
%T  stored, ms since 1970   %D  stored, ISO 8601         %B  sent, ms since 1970
%%  a per cent sign         escapes: \n \t \0 \xHH; end the format with \n

neve produce orders --json      reads the lines of -o json: tags, keys, properties and body

Every command that prints data has -o json.
""",
    ),
    "migration": HelpPage(
        "From Apache RocketMQ to neve.",
        r"""
Side by side     a neve broker under Apache's name server; `neve broker drain` moves producers
                 away from the old broker, and waits for its consumers
Configuration    neve broker -c broker.conf reads Apache's file; `neve doctor -c broker.conf`
                 lists the keys that have an effect, and replacements for the others
Data directory   neve broker --import-from DIR -c broker.conf: messages, topics, groups,
                 committed offsets, delayed and half messages of a stopped broker
Replication      brokerRole=SLAVE: copies the log of a running master, then replaces it
Copy             neve export DIR, neve import DIR: topics, groups, messages, to any cluster

docs/migrate/overview.md describes each way step by step.
""",
    ),
    "stores": HelpPage(
        "URLs of archive stores.",
        r"""
dir:PATH                                            a directory
s3://BUCKET/PREFIX?region=NAME                      S3
s3://BUCKET/PREFIX?endpoint=http://HOST:PORT&region=NAME    MinIO and others

Credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or the role of
the machine, never from the URL. The store must support If-None-Match: * on PUT.

neve doctor --store URL         checks each kind of request, including multipart uploads
neve archive list --store URL   lists its objects, without a broker
""",
    ),
    "times": HelpPage(
        "Times, durations and ranges.",
        r"""
2026-01-31T08:00          ISO 8601; without a zone it is UTC
2026-01-31T08:00+01:00
-90m                      a duration before now
500ms, 30s, 90m, 6h, 1d, 2w                   durations; a TTL may also be forever

Ranges include the start and exclude the end:

neve consume orders --from -1h --to -10m      by store time
neve consume orders --offsets 1500:1600       offsets 1500 to 1599 of each queue
neve group reset billing --to-time -1h        the first message that a group reads next
""",
    ),
    "ttl": HelpPage(
        "How long messages are kept.",
        r"""
neve topic ttl set orders 720h     in both tiers: local disk and archive
neve topic ttl plan orders         what the TTL would delete

Readers do not see an archived message after its TTL. Its object is deleted expireGrace (one
day) later; until then `neve archive unexpire` restores it. A topic without a TTL of its own
has defaultTtlHours, which is forever by default.
""",
    ),
    "watching": HelpPage(
        "Health, metrics and conditions.",
        r"""
curl http://127.0.0.1:10913/readyz         conditions of a broker: since when, cause, effect,
                                           recovery
curl http://127.0.0.1:10913/metrics        metrics for Prometheus; conf/prometheus-rules.yml has
                                           alerts, conf/grafana two dashboards
neve broker show NAME                      the same conditions, from any machine
neve group lag GROUP                       lag of a consumer group
curl http://127.0.0.1:10913/archive/status archive, jobs, errors

metricsExporterType=PROM adds RocketMQ's own metrics. Name servers and controllers have an
adminPort as well, which is off by default.
""",
    ),
}


@click.command("help")
@click.argument("topic", required=False)
def help_(topic: str | None) -> None:
    """Print a page about what several commands share; without TOPIC, list the pages."""
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
