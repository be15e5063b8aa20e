"""All that the kernel uses of the private rooms. ``monarch_kernel`` imports this and the public modules only.

A module is imported when a name of it is first used, because some need torch. ``tests/test_house.py`` compares the two
lists below.
"""

# ruff: noqa: F401
# pyright: reportUnusedImport=false
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch._actors.actor import Actor as Actor
    from monarch._actors.endpoint import methods_of as methods_of
    from monarch._actors.interrupting import interrupt as interrupt
    from monarch._actors.ports import Channel as Channel
    from monarch._core.digests.digest import DIGEST as DIGEST
    from monarch._core.digests.digest import Digest as Digest
    from monarch._core.digests.digest import describe_difference as describe_difference
    from monarch._core.kinds import is_a as is_a
    from monarch._core.kinds import is_dict as is_dict
    from monarch._core.kinds import is_list as is_list
    from monarch._core.kinds import is_tuple as is_tuple
    from monarch._core.roster import split_proc as split_proc
    from monarch._core.shapes.extent import Extent as Extent
    from monarch._core.shapes.extent import Point as Point
    from monarch._core.shapes.extent import axes_text as axes_text
    from monarch._core.shapes.ranks import describe_ranks as describe_ranks
    from monarch._core.shapes.ranks import format_ranks as format_ranks
    from monarch._core.shapes.ranks import parse_ranks as parse_ranks
    from monarch._core.shapes.region import Region as Region
    from monarch._core.shapes.value_mesh import Deferred as Deferred
    from monarch._core.shapes.value_mesh import ValueMesh as ValueMesh
    from monarch._core.steps import in_step as in_step
    from monarch._core.stop_ladder import Activity as Activity
    from monarch._core.stop_ladder import Announce as Announce
    from monarch._core.stop_ladder import Command as Command
    from monarch._core.stop_ladder import Ending as Ending
    from monarch._core.stop_ladder import Free as Free
    from monarch._core.stop_ladder import Freed as Freed
    from monarch._core.stop_ladder import Insist as Insist
    from monarch._core.stop_ladder import Interrupt as Interrupt
    from monarch._core.stop_ladder import Look as Look
    from monarch._core.stop_ladder import Restart as Restart
    from monarch._core.stop_ladder import StopLadder as StopLadder
    from monarch._core.text.advice import Advice as Advice
    from monarch._core.text.advice import advice as advice
    from monarch._core.text.advice import use_advice as use_advice
    from monarch._core.text.causes import describe as describe
    from monarch._core.text.causes import describe_all as describe_all
    from monarch._core.text.durations import duration_text as duration_text
    from monarch._core.text.durations import parse_duration as parse_duration
    from monarch._core.text.excerpt import Excerpt as Excerpt
    from monarch._core.text.excerpt import left_out as left_out
    from monarch._core.text.fold import PROGRESS as PROGRESS
    from monarch._core.text.fold import Block as Block
    from monarch._core.text.tables import html_table as html_table
    from monarch._core.text.tables import text_table as text_table
    from monarch._core.text.unjoined import describe_unjoined as describe_unjoined
    from monarch._core.unjoined import Finding as Finding
    from monarch._groups import breaking as groups
    from monarch._groups.breaking import generation_now as generation_now
    from monarch._groups.torchrun import Script as Script
    from monarch._groups.torchrun import arrange as arrange
    from monarch._groups.torchrun import new_token as new_token
    from monarch._groups.torchrun import run_order as run_order
    from monarch._groups.torchrun import script_of as script_of
    from monarch._groups.torchrun import take_order as take_order
    from monarch._meshes.actors.actor_mesh import ActorMesh as ActorMesh
    from monarch._meshes.actors.actor_mesh import is_actor_mesh as is_actor_mesh
    from monarch._meshes.actors.ask import ask as ask
    from monarch._meshes.actors.ask import endpoint_of as endpoint_of
    from monarch._meshes.actors.class_updates import changes as changes
    from monarch._meshes.actors.class_updates import update_class as update_class
    from monarch._meshes.actors.deferred_calls import at_once as at_once
    from monarch._meshes.host_mesh import HostMesh as HostMesh
    from monarch._meshes.inside import hosts_of as hosts_of
    from monarch._meshes.inside import member_at as member_at
    from monarch._meshes.inside import node_of as node_of
    from monarch._meshes.inside import region_of as region_of
    from monarch._meshes.inside import state_of as state_of
    from monarch._meshes.inside import targets_of as targets_of
    from monarch._meshes.inside import view_at as view_at
    from monarch._meshes.procs.proc_mesh import ProcMesh as ProcMesh
    from monarch._meshes.procs.queries import reaches as reaches
    from monarch._meshes.procs.variables import CellVariables as CellVariables
    from monarch._meshes.registry import meshes_of as meshes_of
    from monarch._node.current import current_node as current_node
    from monarch._node.current import has_node as has_node
    from monarch._node.current import open_node as open_node
    from monarch._node.future import Future as Future
    from monarch._node.future import in_thread as in_thread
    from monarch._node.future import to_its_end as to_its_end
    from monarch._node.future import when_done as when_done
    from monarch._node.gather import Gather as Gather
    from monarch._node.gather import is_gather as is_gather
    from monarch._node.liveness import Liveness as Liveness
    from monarch._node.node import Node as Node
    from monarch._node.remote_errors import is_ours as is_ours
    from monarch._node.services.asking import Answers as Answers
    from monarch._node.services.asking import send_signal as send_signal
    from monarch._node.services.registry import Request as Request
    from monarch._node.services.registry import name_of as name_of
    from monarch._node.services.registry import request as request
    from monarch._notebook.busy import ThreadState as ThreadState
    from monarch._notebook.busy import prod as prod
    from monarch._notebook.busy import thread_state as thread_state
    from monarch._notebook.checkpoint import STATEFUL as STATEFUL
    from monarch._notebook.checkpoint import TENSOR as TENSOR
    from monarch._notebook.checkpoint import VALUE as VALUE
    from monarch._notebook.checkpoint import load as load_variables
    from monarch._notebook.checkpoint import take as take_variables
    from monarch._notebook.complete import complete_here as complete_here
    from monarch._notebook.complete import inspect_here as inspect_here
    from monarch._notebook.copied import give as give_copies
    from monarch._notebook.copied import take as take_copies
    from monarch._notebook.display import CLEAR as CLEAR
    from monarch._notebook.display import UPDATE as UPDATE
    from monarch._notebook.display import Shown as Shown
    from monarch._notebook.execute import CellError as CellError
    from monarch._notebook.execute import CellResult as CellResult
    from monarch._notebook.inside import run_in_actor as run_in_actor
    from monarch._notebook.magics.names import LINE as LINE_MAGICS
    from monarch._notebook.magics.names import PYTHON_CELLS as PYTHON_CELL_MAGICS
    from monarch._notebook.magics.names import why_missing as why_no_magic
    from monarch._notebook.names import defines as defines
    from monarch._notebook.names import names_here as names_here
    from monarch._notebook.names import values_here as values_here
    from monarch._notebook.namespace import Namespace as Namespace
    from monarch._notebook.reload import forget as forget
    from monarch._notebook.reload import reload_here as reload_here
    from monarch._notebook.reload import renamed as renamed
    from monarch._notebook.reload import restore as restore
    from monarch._notebook.vitals import Vitals as Vitals
    from monarch._notebook.vitals import vitals_here as vitals_here
    from monarch._notebook.who.listing import MOST as MOST_VARIABLES
    from monarch._notebook.who.listing import Listing as Listing
    from monarch._notebook.who.listing import Variable as Variable
    from monarch._notebook.who.listing import variables_here as variables_here
    from monarch._procs.agent.services import AgentRequest as AgentRequest
    from monarch._procs.agent.services import shared_gpus as shared_gpus
    from monarch._procs.agent.services import states as states
    from monarch._procs.os.gpus import visible_gpus as visible_gpus
    from monarch._procs.session_folder import host_of as host_of
    from monarch._procs.zygote.user_forks import leave_if_forked as leave_if_forked
    from monarch._procs.zygote.user_forks import watch_forks as watch_forks
    from monarch._session.detached import DetachedMesh as DetachedMesh
    from monarch._session.detached import attach as attach
    from monarch._session.detached import end as end
    from monarch._session.detached import keep as keep
    from monarch._session.detached import records as records
    from monarch._session.output import in_units as in_units
    from monarch._session.output import show_blocks as show_blocks
    from monarch._session.session import need_session as need_session
    from monarch._session.session import shutdown_context as shutdown_context
    from monarch._session.workers import WorkerHosts as WorkerHosts
    from monarch._session.workers import attach_to_workers as attach_to_workers
    from monarch._state.checkpoint.api import Save as Save
    from monarch._state.checkpoint.api import find as find
    from monarch._state.checkpoint.api import folder_of as folder_of
    from monarch._state.checkpoint.api import send as send
    from monarch._state.handoff.sender import StateTransfer as StateTransfer
    from monarch._state.heal import heal_mesh as heal_mesh
    from monarch._supervision.broken_groups import meshes_of_calls as meshes_of_calls
    from monarch._supervision.broken_groups import spoil_groups as spoil_groups
    from monarch._supervision.escalation import describe_unhandled as describe_unhandled
    from monarch._supervision.fail_fast import CallGroup as CallGroup
    from monarch._supervision.freeing import free as free
    from monarch._supervision.healing import replace_procs as replace_procs
    from monarch._supervision.unjoined import UnjoinedCollectives as UnjoinedCollectives
    from monarch._supervision.unjoined import ranks_of as ranks_of
    from monarch._wire.messages import Dead as Dead

_WHERE = {
    "monarch._actors.actor": "Actor",
    "monarch._actors.endpoint": "methods_of",
    "monarch._actors.interrupting": "interrupt",
    "monarch._actors.ports": "Channel",
    "monarch._core.digests.digest": "DIGEST Digest describe_difference",
    "monarch._core.kinds": "is_a is_dict is_list is_tuple",
    "monarch._core.roster": "split_proc",
    "monarch._core.shapes.extent": "Extent Point axes_text",
    "monarch._core.shapes.ranks": "describe_ranks format_ranks parse_ranks",
    "monarch._core.shapes.region": "Region",
    "monarch._core.shapes.value_mesh": "Deferred ValueMesh",
    "monarch._core.steps": "in_step",
    "monarch._core.stop_ladder": "Activity Announce Command Ending Free Freed Insist Interrupt Look Restart StopLadder",
    "monarch._core.text.advice": "Advice advice use_advice",
    "monarch._core.text.causes": "describe describe_all",
    "monarch._core.text.durations": "duration_text parse_duration",
    "monarch._core.text.excerpt": "Excerpt left_out",
    "monarch._core.text.fold": "PROGRESS Block",
    "monarch._core.text.tables": "html_table text_table",
    "monarch._core.text.unjoined": "describe_unjoined",
    "monarch._core.unjoined": "Finding",
    "monarch._groups": "groups=breaking",
    "monarch._groups.breaking": "generation_now",
    "monarch._groups.torchrun": "Script arrange new_token run_order script_of take_order",
    "monarch._meshes.actors.actor_mesh": "ActorMesh is_actor_mesh",
    "monarch._meshes.actors.ask": "ask endpoint_of",
    "monarch._meshes.actors.class_updates": "changes update_class",
    "monarch._meshes.actors.deferred_calls": "at_once",
    "monarch._meshes.host_mesh": "HostMesh",
    "monarch._meshes.procs.variables": "CellVariables",
    "monarch._meshes.inside": "hosts_of member_at node_of region_of state_of targets_of view_at",
    "monarch._meshes.procs.proc_mesh": "ProcMesh",
    "monarch._meshes.procs.queries": "reaches",
    "monarch._meshes.registry": "meshes_of",
    "monarch._node.current": "current_node has_node open_node",
    "monarch._node.future": "Future in_thread to_its_end when_done",
    "monarch._node.gather": "Gather is_gather",
    "monarch._node.liveness": "Liveness",
    "monarch._node.node": "Node",
    "monarch._node.remote_errors": "is_ours",
    "monarch._node.services.asking": "Answers send_signal",
    "monarch._node.services.registry": "Request name_of request",
    "monarch._notebook.busy": "ThreadState prod thread_state",
    "monarch._notebook.checkpoint": "STATEFUL TENSOR VALUE load_variables=load take_variables=take",
    "monarch._notebook.complete": "complete_here inspect_here",
    "monarch._notebook.copied": "give_copies=give take_copies=take",
    "monarch._notebook.display": "CLEAR UPDATE Shown",
    "monarch._notebook.execute": "CellError CellResult",
    "monarch._notebook.inside": "run_in_actor",
    "monarch._notebook.magics.names": "LINE_MAGICS=LINE PYTHON_CELL_MAGICS=PYTHON_CELLS why_no_magic=why_missing",
    "monarch._notebook.names": "defines names_here values_here",
    "monarch._notebook.namespace": "Namespace",
    "monarch._notebook.reload": "forget reload_here renamed restore",
    "monarch._notebook.vitals": "Vitals vitals_here",
    "monarch._notebook.who.listing": "MOST_VARIABLES=MOST Listing Variable variables_here",
    "monarch._procs.agent.services": "AgentRequest shared_gpus states",
    "monarch._procs.os.gpus": "visible_gpus",
    "monarch._procs.session_folder": "host_of",
    "monarch._procs.zygote.user_forks": "leave_if_forked watch_forks",
    "monarch._session.detached": "DetachedMesh attach end keep records",
    "monarch._session.output": "in_units show_blocks",
    "monarch._session.session": "need_session shutdown_context",
    "monarch._session.workers": "WorkerHosts attach_to_workers",
    "monarch._state.checkpoint.api": "Save find folder_of send",
    "monarch._state.handoff.sender": "StateTransfer",
    "monarch._state.heal": "heal_mesh",
    "monarch._supervision.broken_groups": "meshes_of_calls spoil_groups",
    "monarch._supervision.escalation": "describe_unhandled",
    "monarch._supervision.fail_fast": "CallGroup",
    "monarch._supervision.freeing": "free",
    "monarch._supervision.healing": "replace_procs",
    "monarch._supervision.unjoined": "UnjoinedCollectives ranks_of",
    "monarch._wire.messages": "Dead",
}
"""Names by module; ``new=old`` where the name is a different one here."""

_HOME = {
    word.partition("=")[0]: (module, word.partition("=")[2] or word)
    for module, words in _WHERE.items()
    for word in words.split()
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, own = home
    try:
        value = getattr(import_module(module), own)
    except AttributeError:
        value = import_module(f"{module}.{own}")
    globals()[name] = value
    return value
