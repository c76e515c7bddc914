"""Settings of a front end that is a process of its own."""

from typing import Annotated

from dualpath.core.settings import Setting, Settings


class LinkSettings(Settings, frozen=True):
    """Where the scheduler is, and who asks."""

    scheduler: Annotated[
        str,
        Setting(
            "where front ends come in at the router (its front_ends_port)",
            metavar="tcp://HOST:PORT",
        ),
    ]
    front_end_name: Annotated[
        str, Setting("one for each front end of a scheduler; empty: machine and process id")
    ] = ""
    share_port: Annotated[
        bool,
        Setting("others of this user that say so may have the same port; connections are divided"),
    ] = False
