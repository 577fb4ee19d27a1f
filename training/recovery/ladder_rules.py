"""The rules of the ladder in words, by name; guards.py carries them out.

Each name is the name of a test: `test_<name>` in tests/unit/recovery/test_ladder_rules.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perdure.training.recovery.same_node import ROWS

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
    "a_hint_needs_no_recovery_by_itself": LadderRule(
        "An event of severity hint asks for nothing; what it ended all the same is answered by "
        "its class.",
        _MODELARTS,
    ),
    "minor_and_major_chip_faults_are_healed_in_place": LadderRule(
        "Severity minor and major heal themselves: in place comes first, whatever the class.",
        _MODELARTS,
    ),
    "a_critical_chip_fault_never_heals_in_place": LadderRule(
        "Severity critical passes over every rung that stays on the chip.", _MODELARTS
    ),
    "a_code_that_separates_its_chip_never_heals_in_place": LadderRule(
        "Levels SeparateNPU and ManuallySeparateNPU pass over every rung that stays on the chip; "
        "level RestartNPU passes over those inside the processes.",
        _MINDCLUSTER,
    ),
    "when_healing_in_place_fails_the_node_is_isolated": LadderRule(
        "Before processes start again the chip is checked, and reset where its level asks for it; "
        "still ill, the restart has failed: `pod_reschedule` when enabled, else "
        "`job_reschedule_isolated`; a code that a chip reported allows it whatever the class.",
        _MODELARTS,
    ),
    "what_software_did_isolates_no_node": LadderRule(
        "Crashes, time-outs, kernels, host memory and broken connections: in place, then "
        "`job_reschedule`. A node is isolated on evidence that it is the node: a fault of a chip "
        "or node, a check that failed, or the same node again and again.",
        _OURS,
    ),
    "a_container_that_was_taken_away_is_made_anew_and_no_node_is_isolated": LadderRule(
        "Deleted, evicted or preempted: `pod_reschedule` moves that member alone, and its node "
        "stays in the job.",
        _OURS,
    ),
    "the_same_node_again_and_again_is_taken_for_the_cause": LadderRule(
        "Of the newest crashes and the like that each were recovered from, so many within 24 h on "
        "one node that chance alone explains it in fewer than 1 of 100 cases: "
        f"{ROWS_TEXT}.",
        _OURS,
    ),
    "the_same_code_three_times_in_a_row_isolates_the_node": LadderRule(
        "The same code 3 times in a row within 24 h, in the chip's own history: no rung that stays "
        "on the chip.",
        _MODELARTS,
    ),
    "only_another_code_of_the_same_chip_breaks_the_row_of_three": LadderRule(
        "A fault of another chip, another node or of software in between does not.", _MODELARTS
    ),
    "a_code_may_have_a_limit_of_its_own": LadderRule(
        "With `mindcluster_frequency` on, the codes of MindCluster's tables count by their own "
        "numbers (2, 3 or 5 in 24 h), in a row or not.",
        _MINDCLUSTER,
    ),
    "a_code_that_the_program_caused_never_isolates_and_only_reschedules": LadderRule(
        "80C98002 and 80CB8002: the third time in a row `job_reschedule`, never an isolation.",
        _MODELARTS,
    ),
    "any_non_zero_exit_reschedules_when_unconditional_restart_is_on": LadderRule(
        "`job_reschedule` answers any exit when `unconditional` is on. Off, it only follows a "
        "`pod_reschedule` that failed, or a code that the program caused.",
        _MODELARTS,
    ),
    "the_fourth_time_the_same_problem_comes_the_program_is_at_fault": LadderRule(
        "After 3 `job_reschedule` in a row for the same class and code with no node or chip at "
        "fault in between: `stop`.",
        _MODELARTS,
    ),
    "three_hang_restarts_in_a_row_then_stop": LadderRule(
        "`hang_restart` 3 times in a row, then `stop`.", _MODELARTS
    ),
    "a_pod_reschedule_that_fails_becomes_a_job_reschedule": LadderRule(
        "The node is isolated already; no isolation is asked for twice.", _MODELARTS
    ),
    "an_isolation_without_a_healthy_spare_reports_it": LadderRule(
        "The reason gives how many nodes are left; the engine waits `spare_wait_s` for one.",
        _OURS,
    ),
    "without_a_spare_the_job_goes_back_only_if_the_policy_allows": LadderRule(
        "After the wait: `job_reschedule` when `allow_without_isolation` and `unconditional` are "
        "on, else `stop`.",
        _OURS,
    ),
    "a_device_memory_error_climbs_from_step_to_process_to_the_last_checkpoint": LadderRule(
        "UCE: `step_retry`, then `process_replace`, then the survivors save and it goes on in "
        "place.",
        _MINDSPORE,
    ),
    "a_pod_is_replaced_before_a_restart_in_place_where_the_policy_has_it": LadderRule(
        "With `pod_before_in_place` (RSC alone) `pod_reschedule` comes before `in_place_restart`, "
        "where it answers the fault at all.",
        _MINDSPORE,
    ),
    "a_chip_that_had_a_fault_keeps_its_process_only_where_the_policy_has_it": LadderRule(
        "With `process_in_place` (recover-in-place) off, `process_replace` answers no fault of a "
        "chip.",
        _MINDCLUSTER,
    ),
    "a_node_that_is_lost_is_replaced_while_the_processes_of_the_others_live_on": LadderRule(
        "`node_replace`: gone, cut off, or to be left for a chip that never heals; its member "
        "moves to a spare, and its state comes from replicas. What may heal in place stays.",
        _MINDCLUSTER,
    ),
    "survivors_save_before_processes_are_lost": LadderRule(
        "End-of-life checkpoint (TTP) before `in_place_restart` and everything above, when "
        "`end_of_life_checkpoint` is on; not after `numeric_anomaly` and `checkpoint_corrupt`, "
        "nor when nothing was trained.",
        _MINDSPORE,
    ),
    "an_abnormal_step_is_executed_again_from_the_last_good_snapshot": LadderRule(
        "TRE: `step_retry` for `numeric_anomaly` when `numeric_retry` is on.", _MINDSPORE
    ),
    "the_same_step_abnormal_again_is_accepted_and_never_retried_a_third_time": LadderRule(
        "The second time the step is taken as it is and recorded; asked once more, the ladder is "
        "climbed.",
        _MINDSPORE,
    ),
    "an_abnormal_step_that_cannot_be_accepted_costs_the_process_that_made_it": LadderRule(
        "TRE: no number once more, or abnormal after it was accepted: `process_replace` of the "
        "one rank whose own loss is abnormal; its state comes from a replica that went back to "
        "the snapshot.",
        _OURS,
    ),
    "a_retry_that_another_fault_cut_short_was_not_made": LadderRule(
        "What was begun and not carried out, because another fault came first and ended the "
        "processes, is as if it had never been tried.",
        _OURS,
    ),
    "re_execution_of_abnormal_steps_and_data_skipping_exclude_each_other": LadderRule(
        "`numeric_retry` with `data_skipping` is a configuration error.", _MINDSPORE
    ),
    "an_operator_retry_that_fails_becomes_a_step_retry": LadderRule(
        "HCCE: the step is executed again; so it is when the same step fails again.", _MINDSPORE
    ),
    "a_job_recovered_by_operator_retry_is_sub_healthy_and_goes_on": LadderRule(
        "`operator_retry` marks the job; nothing else changes.", _MODELARTS
    ),
    "a_recovery_followed_by_progress_is_free": LadderRule(
        "Budgets count recoveries in a row without a newly committed step.", _OURS
    ),
    "counted_for_ever_a_rescheduling_is_never_free": LadderRule(
        "With `count: ever` all since the run was started use up `max_restarts` and "
        "`pod_retries`, whatever progress there was.",
        _MODELARTS,
    ),
    "what_the_user_must_fix_stops_at_once": LadderRule(
        "`user_code_error`, `launch_misconfigured`, `version_mismatch`: no restart is burnt.",
        _OURS,
    ),
    "a_device_out_of_memory_twice_at_the_same_step_stops": LadderRule(
        "The sizes are to be changed; a third try would end the same.", _OURS
    ),
    "what_the_evidence_leaves_to_the_user_is_tried_once": LadderRule(
        "A class that retries help otherwise, with evidence that they will not (a full disk): "
        "again without progress, `stop`. Not crashes and codes of chips: they are counted.",
        _OURS,
    ),
    "a_full_store_is_not_filled_again": LadderRule(
        "No room in the run's own store: `stop`, since new processes would fill it likewise.",
        _OURS,
    ),
    "an_unsupported_rung_is_skipped_and_the_decision_names_it": LadderRule(
        "What the engine or the run's depth cannot do is listed with the decision.", _OURS
    ),
    "a_rung_that_copies_a_state_is_not_tried_without_a_replica": LadderRule(
        "`process_replace`, `node_replace`, and `step_retry` after `device_memory_error` copy the "
        "state of the ranks at fault: where no other rank has it, by the parallel layout or "
        "because all that had it ended, they are passed over and the decision says so.",
        _MINDSPORE,
    ),
    "rungs_inside_the_processes_need_survivors_and_come_three_times_in_a_row": LadderRule(
        "Each at most 3 times in a row, and only while processes of the attempt live on.", _OURS
    ),
    "the_climb_never_goes_down_without_progress": LadderRule(
        "A fault that a costlier rung answered is not answered by a cheaper one.", _OURS
    ),
}
