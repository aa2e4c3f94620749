"""Settings by the names that other trainers give them: `nearest("learner.lr") == "learner.learning_rate"`.

Read where an unknown setting is refused, in a file and on the command line. The names are those of TRL, verl, slime and
Megatron-LM, without their section and in lower case.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

_NAMES = {
    "run.group_size": "num_generations n_samples_per_prompt num_samples n_rollouts rollouts_per_example samples n",
    "run.groups_per_update": "train_batch_size rollout_batch_size global_batch_size batch_size prompts_per_step "
    "per_device_train_batch_size num_prompts_per_step",
    "run.updates": "max_steps num_rollout total_training_steps num_train_epochs total_epochs train_iters steps",
    "run.evaluate_every": "eval_steps eval_interval test_freq eval_every eval_freq",
    "run.evaluate_attempts": "n_samples_per_eval_prompt",
    "run.checkpoint_every": "save_steps save_interval save_freq ckpt_interval save_every",
    "run.keep_checkpoints": "save_total_limit max_actor_ckpt_to_keep",
    "run.resume": "resume_from_checkpoint resume_mode load",
    "run.name": "experiment_name run_name exp_name",
    "run.folder": "output_dir default_local_dir save save_dir",
    "tasks.path": "dataset dataset_name train_files prompt_data data_path train_file",
    "tasks.heldout_path": "val_files eval_prompt_data test_file",
    "tasks.system": "system_prompt",
    "tasks.environment": "environment_factory env env_name",
    "tasks.max_turns": "max_tool_calling_iterations max_assistant_turns max_user_turns turns",
    "reward.function": "reward_funcs reward_fn custom_reward_function custom_rm_path rm_type reward_model reward_func",
    "reward.weights": "reward_weights",
    "rollout.max_new_tokens": "max_completion_length max_response_length rollout_max_response_len max_length",
    "rollout.max_tokens": "max_seq_len max_model_len rollout_max_context_len max_prompt_length seq_length seq_len",
    "rollout.temperature": "rollout_temperature sampling_temperature",
    "rollout.servers": "num_engines rollout_num_engines inference_gpus vllm_server_count",
    "rollout.urls": "vllm_server_base_url vllm_server_host base_url server_url",
    "rollout.max_concurrent": "max_num_seqs sglang_server_concurrency concurrency",
    "rollout.agent": "custom_generate_function_path agent_loop custom_generate",
    "rollout.sglang": "gpu_memory_utilization mem_fraction_static sglang_mem_fraction_static",
    "grpo.kl_coefficient": "beta kl_coef kl_loss_coef init_kl_coef use_kl_loss kl_beta kl",
    "grpo.kl_in_reward": "use_kl_in_reward",
    "grpo.clip_low": "cliprange clip_ratio eps_clip clip_eps clip_range clip_ratio_low epsilon_low",
    "grpo.clip_high": "eps_clip_high clip_ratio_high epsilon_high",
    "grpo.importance_cap": "importance_sampling_cap vllm_importance_sampling_cap tis_clip rollout_is_threshold use_tis "
    "tis_imp_ratio_cap",
    "grpo.advantage": "advantage_estimator adv_estimator scale_rewards norm_adv_by_std_in_grpo",
    "grpo.dynamic_sampling": "filter_groups dynamic_sampling_filter_path",
    "grpo.overlong_buffer_tokens": "overlong_buffer overlong_buffer_len",
    "loss.normalisation": "loss_type loss_agg_mode normalization calculate_per_token_loss",
    "opd.teacher": "teacher_model teacher_model_name_or_path teacher_model_path teacher_path",
    "streaming.pack_tokens": "max_tokens_per_gpu ppo_max_token_len_per_gpu micro_batch_size "
    "gradient_accumulation_steps",
    "learner.model": "model_name_or_path hf_checkpoint model_path pretrained_model_name_or_path model_name",
    "learner.learning_rate": "lr learning_rates",
    "learner.learning_rate_decay": "lr_scheduler_type lr_decay_style lr_schedule lr_scheduler scheduler",
    "learner.min_learning_rate": "min_lr min_lr_ratio",
    "learner.warmup_updates": "warmup_steps lr_warmup_steps lr_warmup_iters num_warmup_steps warmup_ratio",
    "learner.weight_decay": "wd",
    "learner.clip_grad": "max_grad_norm grad_clip max_norm gradient_clipping",
    "learner.adam_epsilon": "adam_eps eps",
    "learner.dtype": "bf16 fp16 torch_dtype params_dtype precision",
    "learner.tensor_parallel": "tensor_model_parallel_size tp tp_size tensor_parallel_size",
    "learner.pipeline_parallel": "pipeline_model_parallel_size pp pp_size pipeline_parallel_size",
    "learner.context_parallel": "context_parallel_size cp cp_size ulysses_sequence_parallel_size",
    "learner.expert_parallel": "expert_model_parallel_size ep ep_size expert_parallel_size",
    "learner.expert_tensor_parallel": "expert_tensor_parallel_size etp",
    "learner.virtual_pipeline": "virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage vpp",
    "learner.distributed_optimizer": "use_distributed_optimizer zero zero_stage",
    "learner.recompute": "gradient_checkpointing recompute_granularity enable_gradient_checkpointing",
    "learner.lora_rank": "lora_r r lora_dim",
    "learner.lora_targets": "target_modules lora_target_modules",
    "publish.transport": "weight_sync weight_sync_backend update_weight_mode weight_broadcast",
    "metrics.sinks": "report_to logger use_wandb trackers wandb",
    "metrics.project": "project_name wandb_project_name project",
    "metrics.trajectories": "log_completions save_trajectories rollout_data_dir",
    "hardware.gpus_per_node": "n_gpus_per_node num_gpus_per_node",
}
SYNONYMS = {name: setting for setting, names in _NAMES.items() for name in names.split()}


def nearest(unknown: str, known: Collection[str]) -> str:
    """The one of the dotted names `known` that the dotted `unknown` most likely means; empty where none is near.

    A name that stands in another section, or that another trainer uses, counts before one that is spelt alike.
    """
    name = unknown.replace("-", "_").lower()
    key = name.rpartition(".")[2]
    if spelt := difflib.get_close_matches(name, known, 1, 0.9):
        return spelt[0]
    elsewhere = [setting for setting in known if setting.rpartition(".")[2] == key]
    if len(elsewhere) == 1:
        return elsewhere[0]
    if SYNONYMS.get(key, "") in known:
        return SYNONYMS[key]
    near = elsewhere or difflib.get_close_matches(name, known, 1, 0.6)
    return near[0] if near else ""
