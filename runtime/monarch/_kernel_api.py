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
    from monarch._actors.interrupting import drop as drop
    from monarch._actors.interrupting import interrupt as interrupt
    from monarch._actors.pausing.points import hits_of as hits_of
    from monarch._actors.ports import Channel as Channel
    from monarch._core.diagnosis.findings import diagnose as diagnose
    from monarch._core.digests.digest import DIGEST as DIGEST
    from monarch._core.digests.digest import Digest as Digest
    from monarch._core.digests.digest import describe_difference as describe_difference
    from monarch._core.kinds import is_a as is_a
    from monarch._core.kinds import is_dict as is_dict
    from monarch._core.kinds import is_list as is_list
    from monarch._core.kinds import is_tuple as is_tuple
    from monarch._core.position import RUNNING as RUNNING
    from monarch._core.position import Frame as Frame
    from monarch._core.position import Position as Position
    from monarch._core.position import ThreadPosition as ThreadPosition
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
    from monarch._core.stop_ladder import Replace as Replace
    from monarch._core.stop_ladder import StopLadder as StopLadder
    from monarch._core.stop_ladder import starves as starves
    from monarch._core.telemetry import events as events
    from monarch._core.telemetry.calling import called as called
    from monarch._core.telemetry.calling import calling as calling
    from monarch._core.telemetry.event_table import EventTable as EventTable
    from monarch._core.telemetry.events import Collective as Collective
    from monarch._core.telemetry.events import RankState as RankState
    from monarch._core.telemetry.events import ResourceUsage as ResourceUsage
    from monarch._core.telemetry.fold import fold as fold
    from monarch._core.telemetry.model import BarModel as BarModel
    from monarch._core.telemetry.model import CallModel as CallModel
    from monarch._core.telemetry.model import MeshModel as MeshModel
    from monarch._core.telemetry.model import RankModel as RankModel
    from monarch._core.telemetry.model import Series as Series
    from monarch._core.telemetry.model import Span as Span
    from monarch._core.text.advice import Advice as Advice
    from monarch._core.text.advice import advice as advice
    from monarch._core.text.advice import use_advice as use_advice
    from monarch._core.text.causes import describe as describe
    from monarch._core.text.causes import describe_all as describe_all
    from monarch._core.text.causes import participle as participle
    from monarch._core.text.counts import count_text as count_text
    from monarch._core.text.durations import duration_text as duration_text
    from monarch._core.text.durations import parse_duration as parse_duration
    from monarch._core.text.excerpt import Excerpt as Excerpt
    from monarch._core.text.excerpt import left_out as left_out
    from monarch._core.text.folding.blocks import PROGRESS as PROGRESS
    from monarch._core.text.folding.blocks import Block as Block
    from monarch._core.text.tables import html_table as html_table
    from monarch._core.text.tables import text_table as text_table
    from monarch._core.text.threads import describe_threads as describe_threads
    from monarch._core.text.unjoined import describe_unjoined as describe_unjoined
    from monarch._core.text.why import describe_finding as describe_finding
    from monarch._core.unjoined import SYMMETRIC as SYMMETRIC
    from monarch._core.unjoined import CollectiveWait as CollectiveWait
    from monarch._core.unjoined import UnjoinedRanks as UnjoinedRanks
    from monarch._debug.answering import Answering as Answering
    from monarch._debug.collectives_in import collective_in as collective_in
    from monarch._debug.commands import HELP as HELP
    from monarch._debug.commands import Reader as Reader
    from monarch._debug.commands import unknown as unknown
    from monarch._debug.grouped import grouped as grouped
    from monarch._debug.grouped import grouped_lines as grouped_lines
    from monarch._debug.here import pause_here as pause_here
    from monarch._debug.here import where_here as where_here
    from monarch._debug.known import known_here as known_here
    from monarch._debug.pausing import ask_ranks as ask_ranks
    from monarch._debug.resuming import resume_here as resume_here
    from monarch._debug.sentry.controller import Sentries as Sentries
    from monarch._debug.stepping import break_here as break_here
    from monarch._debug.stepping import forget_here as forget_here
    from monarch._debug.stepping import go_here as go_here
    from monarch._debug.stops import PAUSE as PAUSE
    from monarch._debug.stops import StoppedRank as StoppedRank
    from monarch._debug.stops import stops as stops
    from monarch._debug.threads import known_threads as known_threads
    from monarch._debug.threads import threads_here as threads_here
    from monarch._debug.why.explaining import explain as explain
    from monarch._debug.why.explaining import names_of as names_of
    from monarch._debug.why.inquiry import Inquiry as Inquiry
    from monarch._debug.why.inquiry import procs_beyond as procs_beyond
    from monarch._engine.rank.functions.stopping import stop_function as stop_function
    from monarch._engine.simulation.devices import DEVICES as DEVICES
    from monarch._engine.views.summary import failed_tensors as failed_tensors
    from monarch._engine.views.summary import tensors_held as tensors_held
    from monarch._groups import breaking as groups
    from monarch._groups.breaking import generation_now as generation_now
    from monarch._groups.checking import is_on_here as is_checked_here
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
    from monarch._meshes.actors.ask_hosts import HostsAsked as HostsAsked
    from monarch._meshes.actors.ask_hosts import ask_hosts as ask_hosts
    from monarch._meshes.actors.class_updates import changes as changes
    from monarch._meshes.actors.class_updates import is_alike as is_alike
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
    from monarch._meshes.procs.resize import check_sizes as check_sizes
    from monarch._meshes.procs.resize import resize as resize_procs
    from monarch._meshes.procs.variables import CellVariables as CellVariables
    from monarch._meshes.registry import meshes_of as meshes_of
    from monarch._meshes.verdicts import verdicts_of as verdicts_of
    from monarch._node.current import current_node as current_node
    from monarch._node.current import has_node as has_node
    from monarch._node.current import is_fork as is_fork
    from monarch._node.current import open_node as open_node
    from monarch._node.future import Future as Future
    from monarch._node.future import Promise as Promise
    from monarch._node.future import in_thread as in_thread
    from monarch._node.future import to_its_end as to_its_end
    from monarch._node.future import when_done as when_done
    from monarch._node.liveness import Liveness as Liveness
    from monarch._node.node import Node as Node
    from monarch._node.opener import on_opened as on_opened
    from monarch._node.remote_errors import is_ours as is_ours
    from monarch._node.remote_errors import with_source as with_source
    from monarch._node.replies.gather import Gather as Gather
    from monarch._node.replies.gather import is_gather as is_gather
    from monarch._node.services.asking import ServiceAnswers as ServiceAnswers
    from monarch._node.services.asking import ask_soon as ask_soon
    from monarch._node.services.asking import send_signal as send_signal
    from monarch._node.services.asking import tell_proc as tell_proc
    from monarch._node.services.once import new_key as new_key
    from monarch._node.services.registry import ServiceRequest as ServiceRequest
    from monarch._node.services.registry import name_of as name_of
    from monarch._node.services.registry import request as request
    from monarch._notebook.dry.packing import Packed as Packed
    from monarch._notebook.dry.packing import pack as pack_for_dry_run
    from monarch._notebook.dry.rehearsal import Rehearsal as Rehearsal
    from monarch._notebook.dry.rehearsal import SimulatedWorld as SimulatedWorld
    from monarch._notebook.dry.rehearsal import forecast_here as forecast_here
    from monarch._notebook.looking.breaking_off import break_off_here as break_off_here
    from monarch._notebook.looking.differences import compared as compared
    from monarch._notebook.looking.evaluate import evaluated as evaluated
    from monarch._notebook.looking.inspecting import assign_here as assign_in_frame
    from monarch._notebook.looking.inspecting import children_here as children_in_frame
    from monarch._notebook.looking.inspecting import complete_at as complete_in_frame
    from monarch._notebook.looking.inspecting import error_here as error_here
    from monarch._notebook.looking.inspecting import evaluate_here as evaluate_in_frame
    from monarch._notebook.looking.inspecting import forget_here as forget_values_here
    from monarch._notebook.looking.inspecting import rich_here as rich_in_frame
    from monarch._notebook.looking.inspecting import set_here as set_in_frame
    from monarch._notebook.looking.inspecting import share_here as share_in_frame
    from monarch._notebook.looking.inspecting import source_here as source_here
    from monarch._notebook.looking.statements import run_here as run_in_frame
    from monarch._notebook.looking.variables import variables_at as variables_at
    from monarch._notebook.looking.watching import end_here as end_watch_here
    from monarch._notebook.looking.watching import watch_here as watch_here
    from monarch._notebook.magics.names import LINE as LINE_MAGICS
    from monarch._notebook.magics.names import PYTHON_CELLS as PYTHON_CELL_MAGICS
    from monarch._notebook.magics.names import why_missing as why_no_magic
    from monarch._notebook.namespace import Namespace as Namespace
    from monarch._notebook.reload import forget as forget
    from monarch._notebook.reload import reload_here as reload_here
    from monarch._notebook.reload import renamed as renamed
    from monarch._notebook.reload import restore as restore
    from monarch._notebook.reporting.busy import ThreadState as ThreadState
    from monarch._notebook.reporting.busy import prod as prod
    from monarch._notebook.reporting.busy import thread_state as thread_state
    from monarch._notebook.reporting.vitals import Vitals as Vitals
    from monarch._notebook.reporting.vitals import vitals_here as vitals_here
    from monarch._notebook.reporting.whereabouts import Whereabouts as Whereabouts
    from monarch._notebook.reporting.whereabouts import whereabouts as whereabouts
    from monarch._notebook.running.execute import CellError as CellError
    from monarch._notebook.running.execute import CellResult as CellResult
    from monarch._notebook.running.execute import hides_value as hides_value
    from monarch._notebook.showing.display import CLEAR as CLEAR
    from monarch._notebook.showing.display import UPDATE as UPDATE
    from monarch._notebook.showing.display import ShownObject as ShownObject
    from monarch._notebook.variables.afresh import Steps as Steps
    from monarch._notebook.variables.afresh import begin as begin_afresh
    from monarch._notebook.variables.afresh import steps as steps_here
    from monarch._notebook.variables.checkpoint import STATEFUL as STATEFUL
    from monarch._notebook.variables.checkpoint import TENSOR as TENSOR
    from monarch._notebook.variables.checkpoint import VALUE as VALUE
    from monarch._notebook.variables.checkpoint import load as load_variables
    from monarch._notebook.variables.checkpoint import take as take_variables
    from monarch._notebook.variables.copied import Copied as Copied
    from monarch._notebook.variables.copied import copyable_here as copyable_here
    from monarch._notebook.variables.copied import give as give_copies
    from monarch._notebook.variables.copied import take as take_copies
    from monarch._notebook.variables.inside import run_in_actor as run_in_actor
    from monarch._notebook.variables.names import defines as defines
    from monarch._notebook.variables.names import label_of_actors as label_of_actors
    from monarch._notebook.variables.names import names_here as names_here
    from monarch._notebook.variables.names import values_here as values_here
    from monarch._notebook.variables.resampled import resample as resample
    from monarch._notebook.who.complete import complete_here as complete_here
    from monarch._notebook.who.complete import inspect_here as inspect_here
    from monarch._notebook.who.listing import MOST as MOST_VARIABLES
    from monarch._notebook.who.listing import RankListing as RankListing
    from monarch._notebook.who.listing import Variable as Variable
    from monarch._notebook.who.listing import variables_here as variables_here
    from monarch._notebook.who.peek import Peek as Peek
    from monarch._notebook.who.peek import PeekedTensor as PeekedTensor
    from monarch._notebook.who.peek import peek_here as peek_here
    from monarch._procs.agent.detached_records import records as records
    from monarch._procs.agent.services import AgentRequest as AgentRequest
    from monarch._procs.agent.services import shared_gpus as shared_gpus
    from monarch._procs.agent.services import states as states
    from monarch._procs.launch.registry import make_launcher as make_launcher
    from monarch._procs.launch.registry import parse_options as parse_options
    from monarch._procs.os.gpus import visible_gpus as visible_gpus
    from monarch._procs.session_folder import host_of as host_of
    from monarch._procs.zygote.user_forks import leave_if_forked as leave_if_forked
    from monarch._procs.zygote.user_forks import watch_forks as watch_forks
    from monarch._python.frames import caller as caller
    from monarch._python.frames import frame_of as frame_of
    from monarch._python.frames import outward as outward
    from monarch._python.threads import new_thread as new_thread
    from monarch._python.threads import spawn_thread as spawn_thread
    from monarch._session.code import code_files as code_files
    from monarch._session.code import keep_code as keep_code
    from monarch._session.code import lacking as lacking
    from monarch._session.code import read_code as read_code
    from monarch._session.code import use_code as use_code
    from monarch._session.commands.files import Found as FoundFile
    from monarch._session.commands.files import find_files as find_files
    from monarch._session.commands.files import host_here as host_here
    from monarch._session.commands.files import read_piece as read_piece
    from monarch._session.commands.files import write_piece as write_piece
    from monarch._session.detached.attaching import attach as attach
    from monarch._session.detached.attaching import end as end
    from monarch._session.detached.attaching import has_attached as has_attached
    from monarch._session.detached.attaching import leave as leave
    from monarch._session.detached.keeping import keep as keep
    from monarch._session.detached.meshes import DetachedMesh as DetachedMesh
    from monarch._session.display_pace import cost_of as cost_of
    from monarch._session.display_pace import tell_taken as tell_taken
    from monarch._session.draining import HostNotice as HostNotice
    from monarch._session.draining import Preemption as Preemption
    from monarch._session.launching.launching import launch_hosts as launch_hosts
    from monarch._session.session import need_session as need_session
    from monarch._session.session import shutdown_context as shutdown_context
    from monarch._session.shown_lines import in_units as in_units
    from monarch._session.shown_lines import show_blocks as show_blocks
    from monarch._session.workers import WorkerHosts as WorkerHosts
    from monarch._session.workers import attach_to_workers as attach_to_workers
    from monarch._state.checkpoint.api import Save as Save
    from monarch._state.checkpoint.api import find as find
    from monarch._state.checkpoint.api import folder_of as folder_of
    from monarch._state.checkpoint.api import send as send
    from monarch._state.contract import BOTH as BOTH
    from monarch._state.contract import copied_by as copied_by
    from monarch._state.drain import BusyError as BusyError
    from monarch._state.drain import Drained as Drained
    from monarch._state.drain import drain_hosts as drain_hosts
    from monarch._state.handoff.sender import StateTransfer as StateTransfer
    from monarch._state.heal import heal_mesh as heal_mesh
    from monarch._supervision.broken_groups import meshes_of_calls as meshes_of_calls
    from monarch._supervision.broken_groups import spoil_groups as spoil_groups
    from monarch._supervision.escalation import describe_unhandled as describe_unhandled
    from monarch._supervision.fail_fast import CallGroup as CallGroup
    from monarch._supervision.freeing import free as free
    from monarch._supervision.healing import replace_procs as replace_procs
    from monarch._supervision.mesh_failure import report_of as report_of
    from monarch._supervision.unjoined import UnjoinedCollectives as UnjoinedCollectives
    from monarch._supervision.unjoined import ranks_of as ranks_of
    from monarch._telemetry.collector import telemetry_of as telemetry_of
    from monarch._telemetry.mesh_telemetry import MeshTelemetry as MeshTelemetry
    from monarch._telemetry.programs import MeshCopy as MeshCopy
    from monarch._telemetry.programs import Programs as Programs
    from monarch._telemetry.programs import WatchedProgram as WatchedProgram
    from monarch._telemetry.serving import Caption as Caption
    from monarch._telemetry.serving import set_caption as set_caption
    from monarch._wire.messages import Dead as Dead
    from monarch._wire.messages import Failure as Failure

_WHERE = {
    "monarch._actors.actor": "Actor",
    "monarch._actors.endpoint": "methods_of",
    "monarch._actors.interrupting": "drop interrupt",
    "monarch._actors.pausing.points": "hits_of",
    "monarch._actors.ports": "Channel",
    "monarch._core.diagnosis.findings": "diagnose",
    "monarch._core.digests.digest": "DIGEST Digest describe_difference",
    "monarch._python.frames": "caller frame_of outward",
    "monarch._python.threads": "new_thread spawn_thread",
    "monarch._core.kinds": "is_a is_dict is_list is_tuple",
    "monarch._core.position": "Frame Position RUNNING ThreadPosition",
    "monarch._core.roster": "split_proc",
    "monarch._core.shapes.extent": "Extent Point axes_text",
    "monarch._core.shapes.ranks": "describe_ranks format_ranks parse_ranks",
    "monarch._core.shapes.region": "Region",
    "monarch._core.shapes.value_mesh": "Deferred ValueMesh",
    "monarch._core.steps": "in_step",
    "monarch._core.stop_ladder": "Activity Announce Command Ending Free Freed Insist Interrupt Look Replace StopLadder "
    "starves",
    "monarch._core.telemetry": "events",
    "monarch._core.telemetry.calling": "called calling",
    "monarch._core.telemetry.event_table": "EventTable",
    "monarch._core.telemetry.events": "Collective RankState ResourceUsage",
    "monarch._core.telemetry.fold": "fold",
    "monarch._core.telemetry.model": "BarModel CallModel MeshModel RankModel Series Span",
    "monarch._core.text.advice": "Advice advice use_advice",
    "monarch._core.text.causes": "describe describe_all participle",
    "monarch._core.text.counts": "count_text",
    "monarch._core.text.durations": "duration_text parse_duration",
    "monarch._core.text.excerpt": "Excerpt left_out",
    "monarch._core.text.folding.blocks": "PROGRESS Block",
    "monarch._core.text.tables": "html_table text_table",
    "monarch._core.text.threads": "describe_threads",
    "monarch._core.text.unjoined": "describe_unjoined",
    "monarch._core.text.why": "describe_finding",
    "monarch._core.unjoined": "SYMMETRIC UnjoinedRanks CollectiveWait",
    "monarch._engine.rank.functions.stopping": "stop_function",
    "monarch._engine.simulation.devices": "DEVICES",
    "monarch._engine.views.summary": "failed_tensors tensors_held",
    "monarch._groups": "groups=breaking",
    "monarch._groups.breaking": "generation_now",
    "monarch._groups.checking": "is_checked_here=is_on_here",
    "monarch._groups.torchrun": "Script arrange new_token run_order script_of take_order",
    "monarch._meshes.actors.actor_mesh": "ActorMesh is_actor_mesh",
    "monarch._debug.answering": "Answering",
    "monarch._debug.pausing": "ask_ranks",
    "monarch._debug.collectives_in": "collective_in",
    "monarch._debug.commands": "HELP Reader unknown",
    "monarch._debug.grouped": "grouped grouped_lines",
    "monarch._debug.here": "pause_here where_here",
    "monarch._debug.sentry.controller": "Sentries",
    "monarch._debug.known": "known_here",
    "monarch._debug.resuming": "resume_here",
    "monarch._debug.why.explaining": "explain names_of",
    "monarch._debug.why.inquiry": "Inquiry procs_beyond",
    "monarch._debug.stepping": "break_here forget_here go_here",
    "monarch._debug.stops": "PAUSE StoppedRank stops",
    "monarch._debug.threads": "known_threads threads_here",
    "monarch._meshes.actors.ask": "ask endpoint_of",
    "monarch._meshes.actors.ask_hosts": "HostsAsked ask_hosts",
    "monarch._meshes.actors.class_updates": "changes is_alike update_class",
    "monarch._meshes.actors.deferred_calls": "at_once",
    "monarch._meshes.host_mesh": "HostMesh",
    "monarch._meshes.procs.variables": "CellVariables",
    "monarch._meshes.inside": "hosts_of member_at node_of region_of state_of targets_of view_at",
    "monarch._meshes.procs.proc_mesh": "ProcMesh",
    "monarch._meshes.procs.queries": "reaches",
    "monarch._meshes.procs.resize": "check_sizes resize_procs=resize",
    "monarch._meshes.registry": "meshes_of",
    "monarch._meshes.verdicts": "verdicts_of",
    "monarch._node.current": "current_node has_node is_fork open_node",
    "monarch._node.future": "Future Promise in_thread to_its_end when_done",
    "monarch._node.replies.gather": "Gather is_gather",
    "monarch._node.liveness": "Liveness",
    "monarch._node.node": "Node",
    "monarch._node.opener": "on_opened",
    "monarch._node.remote_errors": "is_ours with_source",
    "monarch._node.services.asking": "ServiceAnswers ask_soon send_signal tell_proc",
    "monarch._node.services.once": "new_key",
    "monarch._node.services.registry": "ServiceRequest name_of request",
    "monarch._notebook.reporting.busy": "ThreadState prod thread_state",
    "monarch._notebook.variables.checkpoint": "STATEFUL TENSOR VALUE load_variables=load take_variables=take",
    "monarch._notebook.who.complete": "complete_here inspect_here",
    "monarch._notebook.variables.afresh": "Steps begin_afresh=begin steps_here=steps",
    "monarch._notebook.variables.copied": "Copied copyable_here give_copies=give take_copies=take",
    "monarch._notebook.showing.display": "CLEAR UPDATE ShownObject",
    "monarch._session.display_pace": "cost_of tell_taken",
    "monarch._notebook.dry.packing": "Packed pack_for_dry_run=pack",
    "monarch._notebook.dry.rehearsal": "Rehearsal SimulatedWorld forecast_here",
    "monarch._notebook.running.execute": "CellError CellResult hides_value",
    "monarch._notebook.variables.inside": "run_in_actor",
    "monarch._notebook.looking.breaking_off": "break_off_here",
    "monarch._notebook.looking.differences": "compared",
    "monarch._notebook.looking.inspecting": (
        "assign_in_frame=assign_here children_in_frame=children_here complete_in_frame=complete_at "
        "error_here evaluate_in_frame=evaluate_here forget_values_here=forget_here "
        "rich_in_frame=rich_here set_in_frame=set_here share_in_frame=share_here source_here"
    ),
    "monarch._notebook.looking.statements": "run_in_frame=run_here",
    "monarch._notebook.looking.watching": "end_watch_here=end_here watch_here",
    "monarch._notebook.looking.variables": "variables_at",
    "monarch._notebook.magics.names": "LINE_MAGICS=LINE PYTHON_CELL_MAGICS=PYTHON_CELLS why_no_magic=why_missing",
    "monarch._notebook.variables.names": "defines label_of_actors names_here values_here",
    "monarch._notebook.variables.resampled": "resample",
    "monarch._notebook.namespace": "Namespace",
    "monarch._notebook.reload": "forget reload_here renamed restore",
    "monarch._notebook.reporting.vitals": "Vitals vitals_here",
    "monarch._notebook.reporting.whereabouts": "Whereabouts whereabouts",
    "monarch._notebook.who.listing": "MOST_VARIABLES=MOST RankListing Variable variables_here",
    "monarch._notebook.looking.evaluate": "evaluated",
    "monarch._notebook.who.peek": "Peek PeekedTensor peek_here",
    "monarch._procs.agent.detached_records": "records",
    "monarch._procs.agent.services": "AgentRequest shared_gpus states",
    "monarch._procs.launch.registry": "make_launcher parse_options",
    "monarch._procs.os.gpus": "visible_gpus",
    "monarch._procs.session_folder": "host_of",
    "monarch._procs.zygote.user_forks": "leave_if_forked watch_forks",
    "monarch._session.code": "code_files keep_code lacking read_code use_code",
    "monarch._session.detached.attaching": "attach end has_attached leave",
    "monarch._session.detached.keeping": "keep",
    "monarch._session.detached.meshes": "DetachedMesh",
    "monarch._session.commands.files": "FoundFile=Found find_files host_here read_piece write_piece",
    "monarch._session.draining": "HostNotice Preemption",
    "monarch._session.launching.launching": "launch_hosts",
    "monarch._session.shown_lines": "in_units show_blocks",
    "monarch._session.session": "need_session shutdown_context",
    "monarch._session.workers": "WorkerHosts attach_to_workers",
    "monarch._state.checkpoint.api": "Save find folder_of send",
    "monarch._state.drain": "BusyError Drained drain_hosts",
    "monarch._state.contract": "BOTH copied_by",
    "monarch._state.handoff.sender": "StateTransfer",
    "monarch._state.heal": "heal_mesh",
    "monarch._supervision.broken_groups": "meshes_of_calls spoil_groups",
    "monarch._supervision.escalation": "describe_unhandled",
    "monarch._supervision.mesh_failure": "report_of",
    "monarch._supervision.fail_fast": "CallGroup",
    "monarch._supervision.freeing": "free",
    "monarch._supervision.healing": "replace_procs",
    "monarch._supervision.unjoined": "UnjoinedCollectives ranks_of",
    "monarch._telemetry.collector": "telemetry_of",
    "monarch._telemetry.mesh_telemetry": "MeshTelemetry",
    "monarch._telemetry.programs": "MeshCopy WatchedProgram Programs",
    "monarch._telemetry.serving": "Caption set_caption",
    "monarch._wire.messages": "Dead Failure",
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
