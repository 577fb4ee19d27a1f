"""The rules of the ladder in words, by name; guards.py carries them out.

Each name is the name of a test: `test_<name>` in tests/unit/recovery/test_ladder_rules.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perdure.training.recovery.node_suspicion import ROWS

_MODELARTS = "ModelArts"
_MINDCLUSTER = "MindCluster"
_MINDSPORE = "MindSpore"
_OURS = "Perdure"

ROWS_TEXT = "; ".join(f"{row.times} of {row.of} on {row.nodes} nodes or more" for row in ROWS)


@dataclass(frozen=True, slots=True)
class LadderRule:
    """A rule in words, and whose it is."""

    sentence: str
    source: str


RULES: Mapping[str, LadderRule] = {
    "restarts_in_place_do_not_use_up_the_maximum_restart_count": LadderRule(
        "`in_place_restart` and `hang_restart` leave `max_restarts` (job-retry-num) as it is.",
        _MODELARTS,
    ),
    "rescheduling_uses_up_the_maximum_restart_count": LadderRule(
        "Each `pod_reschedule`, `job_reschedule_isolated` and `job_reschedule` uses one of "
        "`max_restarts`.",
        _MODELARTS,
    ),
    "without_a_maximum_restart_count_the_job_is_never_rescheduled": LadderRule(
        "Without job-retry-num (`max_restarts: 0`), no `pod_reschedule`, "
        "`job_reschedule_isolated` or `job_reschedule` answers, whatever else is on.",
        _MODELARTS,
    ),
    "a_hint_needs_no_recovery_by_itself": LadderRule(
        "An event of severity hint needs no recovery. If it ended the attempt all the same, its "
        "class decides.",
        _MODELARTS,
    ),
    "minor_and_major_chip_faults_are_healed_in_place": LadderRule(
        "Faults of severity minor and major heal by themselves: recovery in place comes first, "
        "for every class.",
        _MODELARTS,
    ),
    "a_restart_in_place_answers_only_where_the_policy_has_it": LadderRule(
        "`in_place_restart` answers only with `in_place` on, at most `in_place_retries` times "
        "in a row.",
        _MODELARTS,
    ),
    "a_critical_chip_fault_never_heals_in_place": LadderRule(
        "A fault of severity critical skips every rung that stays on the chip.",
        _MODELARTS,
    ),
    "a_code_that_separates_its_chip_never_heals_in_place": LadderRule(
        "Codes of level SeparateNPU and ManuallySeparateNPU skip every rung that stays on the "
        "chip; codes of level RestartNPU skip the rungs inside the processes.",
        _MINDCLUSTER,
    ),
    "when_healing_in_place_fails_the_node_is_isolated": LadderRule(
        "Before processes start again, the chip is checked, and reset if its level asks for it. "
        "If the fault is still there, the restart has failed: `pod_reschedule` answers if it is "
        "enabled, else `job_reschedule_isolated`. A code that a chip reported allows this for "
        "every class.",
        _MODELARTS,
    ),
    "only_what_moves_isolates_and_only_the_node_of_the_fault": LadderRule(
        "A decision isolates the node of its fault or none, and only with `node_replace`, "
        "`pod_reschedule` or `job_reschedule_isolated`.",
        _MODELARTS,
    ),
    "what_software_did_isolates_no_node": LadderRule(
        "Crashes, time-outs, kernels, host memory and broken connections are answered in place, "
        "then by `job_reschedule`. A node is isolated only on evidence against it: a fault of a "
        "chip or node, a check that failed, or repeated faults on the same node.",
        _OURS,
    ),
    "a_node_that_takes_no_files_is_left": LadderRule(
        "If a node's scratch folder takes no files (full, read-only, gone), no process starts "
        "there: `pod_reschedule` or `job_reschedule_isolated` answers, and `stop` where no other "
        "node is free.",
        _OURS,
    ),
    "a_container_that_was_taken_away_is_made_anew_and_no_node_is_isolated": LadderRule(
        "If a container was deleted or evicted, `pod_reschedule` moves that member "
        "alone, and its node stays in the job.",
        _OURS,
    ),
    "the_same_node_again_and_again_is_taken_for_the_cause": LadderRule(
        "A node counts as the cause if so many of the newest crashes and similar faults within "
        "24 h, each recovered from, were on it that chance alone explains this in fewer than 1 of "
        f"100 cases: {ROWS_TEXT}.",
        _OURS,
    ),
    "the_same_code_three_times_in_a_row_isolates_the_node": LadderRule(
        "The same code 3 times in a row within 24 h, in the chip's own history, excludes every "
        "rung that stays on the chip.",
        _MODELARTS,
    ),
    "only_another_code_of_the_same_chip_breaks_the_row_of_three": LadderRule(
        "A fault of another chip, of another node or of software in between does not break the "
        "row.",
        _MODELARTS,
    ),
    "a_code_may_have_a_limit_of_its_own": LadderRule(
        "With `mindcluster_frequency` on, the codes of MindCluster's tables count by their own "
        "numbers (2, 3 or 5 in 24 h), in a row or not.",
        _MINDCLUSTER,
    ),
    "a_code_that_the_program_caused_never_isolates_and_only_reschedules": LadderRule(
        "80C98002 and 80CB8002: the third time in a row, `job_reschedule` answers; no node is "
        "ever isolated for them.",
        _MODELARTS,
    ),
    "any_non_zero_exit_reschedules_when_unconditional_restart_is_on": LadderRule(
        "With `unconditional` on, `job_reschedule` answers any exit. With `unconditional` off, "
        "it only follows a `pod_reschedule` that failed, a code that the program caused, or a "
        "pod that the cluster preempted.",
        _MODELARTS,
    ),
    "the_fourth_time_the_same_problem_comes_the_program_is_at_fault": LadderRule(
        "`stop` follows 3 `job_reschedule` in a row for the same class and code, if no node or "
        "chip was at fault in between.",
        _MODELARTS,
    ),
    "three_hang_restarts_in_a_row_then_stop": LadderRule(
        "`stop` follows 3 `hang_restart` in a row. A restart for another fault ends the row; a "
        "recovery inside the processes does not.",
        _MODELARTS,
    ),
    "a_hang_is_restarted_only_where_the_policy_has_it": LadderRule(
        "`hang_restart` answers only with `hang` (hang-retry) on.",
        _MODELARTS,
    ),
    "a_hang_alone_moves_nothing": LadderRule(
        "A hang without a chip or node at fault is answered in its containers, or the run "
        "stops: no rescheduling.",
        _MODELARTS,
    ),
    "a_pod_reschedule_that_fails_becomes_a_job_reschedule": LadderRule(
        "The node is isolated already, so no second isolation is requested.",
        _MODELARTS,
    ),
    "a_pod_is_rescheduled_as_often_as_the_policy_says": LadderRule(
        "`pod_reschedule` answers `pod_retries` (pod-retry-num) times at most.",
        _MODELARTS,
    ),
    "a_pod_comes_before_the_job_where_pods_may_be_rescheduled": LadderRule(
        "`job_reschedule_isolated` answers only where `pod_reschedule` may not, and the "
        "decision says why.",
        _MODELARTS,
    ),
    "a_rung_that_failed_for_one_node_is_open_for_another": LadderRule(
        "A rung that could not be carried out, for lack of a spare or otherwise, is passed over "
        "only for further faults of the same node.",
        _OURS,
    ),
    "an_isolation_without_a_healthy_spare_reports_it": LadderRule(
        "The reason gives the number of nodes that are left, and the engine waits "
        "`spare_wait_s` for a spare.",
        _OURS,
    ),
    "without_a_spare_the_job_goes_back_only_if_the_policy_allows": LadderRule(
        "After the wait, `job_reschedule` answers if `allow_without_isolation` and "
        "`unconditional` are on, else `stop`.",
        _OURS,
    ),
    "a_device_memory_error_climbs_from_step_to_process_to_the_last_checkpoint": LadderRule(
        "UCE: `step_retry`, then `process_replace`. After these, the survivors save, and the "
        "job restarts in place.",
        _MINDSPORE,
    ),
    "a_memory_error_repeats_its_step_only_where_the_policy_has_it": LadderRule(
        "UCE: `step_retry` answers `device_memory_error` only with `memory_retry` on.",
        _MINDSPORE,
    ),
    "a_failed_collective_repeats_its_step_only_where_the_policy_has_it": LadderRule(
        "HCCE: `step_retry` answers `collective_timeout` and `link_down` only with "
        "`collective_retry` on.",
        _MINDSPORE,
    ),
    "a_process_is_replaced_only_where_the_policy_has_it_and_a_rank_is_to_blame": LadderRule(
        "ARF: `process_replace` answers only with `process_replace` on, and only for the rank "
        "of the fault.",
        _MINDSPORE,
    ),
    "a_pod_is_replaced_before_a_restart_in_place_where_the_policy_has_it": LadderRule(
        "With `pod_before_in_place` (RSC), `pod_reschedule` comes before `in_place_restart`, also "
        "for a process that ended on a single node. The other containers stay; the node is "
        "isolated only on evidence against it.",
        _MINDSPORE,
    ),
    "a_chip_that_had_a_fault_keeps_its_process_only_where_the_policy_has_it": LadderRule(
        "With `process_in_place` (recover-in-place) off, `process_replace` answers no fault of a "
        "chip.",
        _MINDCLUSTER,
    ),
    "a_node_that_is_lost_is_replaced_while_the_processes_of_the_others_live_on": LadderRule(
        "`node_replace` answers when a node is gone, cut off, or evacuated for a chip that "
        "never heals. The node's member moves to a spare and gets its state from replicas. A "
        "node whose fault may heal in place stays.",
        _MINDCLUSTER,
    ),
    "a_node_or_container_that_is_gone_gets_no_new_process": LadderRule(
        "Faults of the classes `node_lost` and `container_lost` skip every rung that starts "
        "processes in the same container.",
        _MINDCLUSTER,
    ),
    "a_device_that_is_gone_is_trained_on_again_only_where_its_code_allows_it": LadderRule(
        "`device_lost` skips every rung that stays on the chip, unless its code, its severity "
        "or the evidence shows that the chip may serve new processes.",
        _MINDCLUSTER,
    ),
    "survivors_save_before_processes_are_lost": LadderRule(
        "With `end_of_life_checkpoint` on, the survivors save (TTP) before `in_place_restart` "
        "and every higher rung. They do not save after `numeric_anomaly` and "
        "`checkpoint_corrupt`, or when nothing was trained.",
        _MINDSPORE,
    ),
    "an_abnormal_step_is_executed_again_from_the_last_good_snapshot": LadderRule(
        "TRE: `step_retry` answers `numeric_anomaly` when `numeric_retry` is on.",
        _MINDSPORE,
    ),
    "the_same_step_abnormal_again_is_accepted_and_never_retried_a_third_time": LadderRule(
        "The second time, the step is accepted and recorded. If it is reported once more, the "
        "ladder continues with the next rung.",
        _MINDSPORE,
    ),
    "an_abnormal_step_that_cannot_be_accepted_costs_the_process_that_made_it": LadderRule(
        "TRE: if a value is not a number for the second time, or abnormal after it was "
        "accepted, `process_replace` answers for the only rank whose own loss is abnormal. Its "
        "state comes from a replica that went back to the snapshot.",
        _OURS,
    ),
    "a_retry_that_another_fault_cut_short_was_not_made": LadderRule(
        "A retry that began but was not completed, because another fault came first and ended "
        "the processes, does not count.",
        _OURS,
    ),
    "re_execution_of_abnormal_steps_and_data_skipping_exclude_each_other": LadderRule(
        "`numeric_retry` with `data_skipping` is a configuration error.", _MINDSPORE
    ),
    "an_operator_retry_that_fails_becomes_a_step_retry": LadderRule(
        "HCCE: if operator retry fails, or the same step fails again after it, `step_retry` "
        "answers.",
        _MINDSPORE,
    ),
    "a_job_recovered_by_operator_retry_is_sub_healthy_and_goes_on": LadderRule(
        "`operator_retry` marks the job as sub-healthy and changes nothing else.",
        _MODELARTS,
    ),
    "an_operator_retry_answers_broken_links_alone_and_where_it_is_enabled": LadderRule(
        "`operator_retry` answers `link_down` alone, and only with hccl_op_retry on.",
        _MODELARTS,
    ),
    "a_recovery_followed_by_progress_is_free": LadderRule(
        "Budgets count recoveries in a row without a newly committed step.", _OURS
    ),
    "counted_for_ever_a_rescheduling_is_never_free": LadderRule(
        "With `count: ever`, all reschedulings since the start of the run use up `max_restarts` "
        "and `pod_retries`, even if the run made progress.",
        _MODELARTS,
    ),
    "what_the_user_must_fix_stops_at_once": LadderRule(
        "`user_code_error`, `launch_misconfigured` and `version_mismatch` stop the run without "
        "a restart.",
        _OURS,
    ),
    "a_device_out_of_memory_twice_at_the_same_step_stops": LadderRule(
        "The user has to change the sizes, because a third try would end in the same way.",
        _OURS,
    ),
    "a_hang_again_at_the_same_step_and_place_of_the_program_stops": LadderRule(
        "The second time that the same rank hangs at the same step in the same function of the "
        "program, outside of a collective, the program causes it, and another restart would hang "
        "there again.",
        _OURS,
    ),
    "what_the_evidence_leaves_to_the_user_is_tried_once": LadderRule(
        "A fault is answered only once if retries usually help its class but the evidence shows "
        "that they will not (a full disk). Without progress, the next answer is `stop`. Crashes "
        "and codes of chips are counted instead.",
        _OURS,
    ),
    "a_full_store_is_not_filled_again": LadderRule(
        "If the run's own store has no room, the run stops, because new processes would fill "
        "the store again.",
        _OURS,
    ),
    "a_job_that_a_person_cancelled_is_not_started_again": LadderRule(
        "If the evidence shows that a person ended the job (`scancel`, `bkill`, `docker stop`), "
        "the run stops: its user may start it again.",
        _OURS,
    ),
    "a_job_that_was_preempted_is_rescheduled_or_stops": LadderRule(
        "A job that its scheduler took away is not restarted where it was: `job_reschedule` "
        "answers, else `stop`.",
        _OURS,
    ),
    "an_unsupported_rung_is_skipped_and_the_decision_names_it": LadderRule(
        "The decision lists the rungs that the engine or the run's depth cannot do.",
        _OURS,
    ),
    "every_rung_that_was_passed_over_has_its_reason": LadderRule(
        "Each cheaper rung of the class's ladder is in `skipped` once, with the reason why it "
        "does not answer.",
        _OURS,
    ),
    "a_rung_that_copies_a_state_is_not_tried_without_a_replica": LadderRule(
        "`process_replace`, `node_replace`, and `step_retry` after `device_memory_error` copy "
        "the state of the ranks at fault. If no other rank has that state, because of the "
        "parallel layout or because every rank that had it ended, they are skipped and the "
        "decision says so.",
        _MINDSPORE,
    ),
    "rungs_inside_the_processes_need_survivors_and_come_three_times_in_a_row": LadderRule(
        "Each of these rungs answers at most 3 times in a row, and only while processes of the "
        "attempt live on.",
        _OURS,
    ),
    "the_climb_never_goes_down_without_progress": LadderRule(
        "After a costlier rung has answered a fault, no cheaper rung answers it without "
        "progress in between.",
        _OURS,
    ),
    "a_stop_isolates_and_accepts_nothing": LadderRule(
        "With `stop` no node is isolated and no abnormal step accepted: what ends a run leaves "
        "its nodes as they are.",
        _OURS,
    ),
}
