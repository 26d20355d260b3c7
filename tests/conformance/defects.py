"""The defects reported against gateways of this kind; each has a test of its name (`test_<name>`) in this folder.

The words are what the results show. A test checks that none is without its test and none is tested without its words.
"""

from __future__ import annotations

DEFECTS: dict[str, str] = {
    "token_ids_lost_while_tool_calls_stream": "Token ids are lost while tool calls stream",
    "ids_dropped_by_reasoning_parser": "Ids are dropped by the reasoning parser",
    "matched_stop_token_missing": "What stopped the answer (end of turn, stop string) is missing from the ids",
    "eos_off_by_one": "Ids, log-probs and usage differ by one at the end of the turn",
    "earlier_thinking_stripped_by_template": "The template strips earlier thinking, and sampled tokens are lost by it",
    "missing_prompt_ids_taken_as_empty": "Prompt ids that the engine did not give are taken as an empty prompt",
    "logprobs_true_top_logprobs_null": "`logprobs: true, top_logprobs: null` is a 500",
    "minus_infinity_in_json": "`-Infinity` stands in the JSON",
    "client_logprobs_false_defeats_capture": "A client's `logprobs: false` defeats the capture",
    "client_temperature_silently_kept": "A client's temperature silently stays instead of the policy's",
    "tool_parser_loses_a_brace": "The tool parser loses a closing brace",
    "tool_parser_fails_on_braces_in_arguments": "The tool parser fails on braces inside of arguments",
    "tool_choice_required_duplicates_streamed_text": "`tool_choice: required` duplicates streamed text",
    "n_greater_one_corrupts_streamed_tool_calls": "`n > 1` corrupts streamed tool calls",
    "tool_call_id_missing_in_streams": "Streamed tool calls have no id",
    "usage_chunk_has_choices": "The usage chunk has choices",
    "explicit_include_usage_false_overridden": "An explicit `include_usage: false` is overridden",
    "huge_default_max_tokens": "A huge default of max_tokens makes each call a 400",
    "huge_max_tokens_of_an_agent": "An agent's own huge max_tokens makes each call a 400",
    "billing_header_breaks_the_prefix": "A changing billing block breaks the prefix",
    "moving_cache_marks_break_the_prefix": "Moving cache marks break the prefix",
    "sdk_retry_forks_the_trace": "An SDK's retry forks the trace",
    "identical_body_taken_for_a_retry": "An identical body that is no retry is taken for one",
    "streamed_turn_without_retry_protection": "A retry of a streamed turn forks the trace",
    "next_request_races_uncommitted_turn": "The next request overtakes the turn's commit",
    "upstream_left_running_after_client_left": "The engine works on after the client left",
    "least_busy_routing_prefers_one_backend": "Least-busy routing sends nearly all to one engine",
    "concurrency_not_bounded_when_agents_fan_out": "Nothing bounds an agent's requests at once",
    "title_trained": "A title call is trained under the task's reward",
    "quota_probe_trained": "A quota probe is trained under the task's reward",
    "rejected_compaction_trained": "A rejected compaction is trained under the task's reward",
    "adapter_unloaded_while_in_use": "An adapter is unloaded while a request uses it",
}
