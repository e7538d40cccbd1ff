/*
 * The public structs and numbers as programs were compiled with them. This file fails to compile if one of them moves: such a change
 * needs a new name of the library. A field may be added at the end of nebula_options, which carries its own size.
 */
#include "nebula.h"

#define SIZE(type, bytes) _Static_assert(sizeof(struct type) == (bytes), #type)
#define AT(type, field, bytes) _Static_assert(offsetof(struct type, field) == (bytes), #type "." #field)
#define IS(name, value) _Static_assert((name) == (value), #name)

SIZE(nebula_error, 524);
AT(nebula_error, status, 0);
AT(nebula_error, sys_errno, 4);
AT(nebula_error, http_status, 8);
AT(nebula_error, message, 12);

SIZE(nebula_pulse_options, 12);
AT(nebula_pulse_options, stack_signal, 0);
AT(nebula_pulse_options, stack_fd, 4);
AT(nebula_pulse_options, ends_hung, 8);

/* nebula_options may grow */
AT(nebula_options, struct_size, 0);
AT(nebula_options, persist_path, 8);
AT(nebula_options, job, 16);
AT(nebula_options, output_dir, 24);
AT(nebula_options, run, 32);
AT(nebula_options, persist_interval_s, 40);
AT(nebula_options, retention_count, 48);
AT(nebula_options, rank, 52);
AT(nebula_options, world, 56);
AT(nebula_options, local_rank, 60);
AT(nebula_options, local_world, 64);
AT(nebula_options, memory_bytes, 72);
AT(nebula_options, on_full, 80);
AT(nebula_options, keep_last, 84);
AT(nebula_options, keep_every, 88);
AT(nebula_options, replica_count, 96);
AT(nebula_options, agent_path, 104);
AT(nebula_options, keep_best, 112);
AT(nebula_options, keep_best_count, 120);
AT(nebula_options, keep_best_is_largest, 124);
AT(nebula_options, is_reader, 128);
AT(nebula_options, is_spare, 132);
AT(nebula_options, keep_items, 136);
AT(nebula_options, keep_hourly, 144);
AT(nebula_options, keep_daily, 148);
AT(nebula_options, keep_weekly, 152);
AT(nebula_options, keep_within_s, 156);
AT(nebula_options, has_spares, 160);

SIZE(nebula_tensor, 152);
AT(nebula_tensor, name, 0);
AT(nebula_tensor, dtype, 8);
AT(nebula_tensor, dim_count, 12);
AT(nebula_tensor, shape, 16);
AT(nebula_tensor, data, 144);

SIZE(nebula_range, 16);
AT(nebula_range, data, 0);
AT(nebula_range, size, 8);

SIZE(nebula_keep, 48);
AT(nebula_keep, release, 0);
AT(nebula_keep, argument, 8);
AT(nebula_keep, is_unprotectable, 16);
AT(nebula_keep, fill, 24);
AT(nebula_keep, filled, 32);
AT(nebula_keep, may_overlap, 40);

SIZE(nebula_event, 800);
AT(nebula_event, kind, 0);
AT(nebula_event, at, 8);
AT(nebula_event, seconds, 16);
AT(nebula_event, size, 24);
AT(nebula_event, tag, 32);
AT(nebula_event, text, 288);

SIZE(nebula_part, 24);
AT(nebula_part, offset, 0);
AT(nebula_part, size, 8);
AT(nebula_part, data, 16);

IS(NEBULA_OK, 0);
IS(NEBULA_TIMEOUT, 10);
IS(NEBULA_BUSY, 11);
IS(NEBULA_NOT_FOUND, 20);
IS(NEBULA_STORAGE, 21);
IS(NEBULA_NO_SPACE, 22);
IS(NEBULA_CORRUPT, 23);
IS(NEBULA_FAILED, 30);
IS(NEBULA_NO_MEMORY, 31);
IS(NEBULA_UNAVAILABLE, 40);
IS(NEBULA_INTERNAL, 41);
IS(NEBULA_INVALID, 50);
IS(NEBULA_STATE_CAPTURING, 0);
IS(NEBULA_STATE_CAPTURED, 1);
IS(NEBULA_STATE_COMMITTED, 2);
IS(NEBULA_STATE_REPLICATED, 3);
IS(NEBULA_STATE_DURABLE, 4);
IS(NEBULA_STATE_FAILED, 5);
IS(NEBULA_ON_FULL_WAIT, 0);
IS(NEBULA_ON_FULL_STREAM, 1);
IS(NEBULA_ON_FULL_SKIP, 2);
IS(NEBULA_DTYPE_U8, 0);
IS(NEBULA_DTYPE_I8, 1);
IS(NEBULA_DTYPE_I16, 2);
IS(NEBULA_DTYPE_I32, 3);
IS(NEBULA_DTYPE_I64, 4);
IS(NEBULA_DTYPE_F16, 5);
IS(NEBULA_DTYPE_BF16, 6);
IS(NEBULA_DTYPE_F32, 7);
IS(NEBULA_DTYPE_F64, 8);
IS(NEBULA_DTYPE_C64, 9);
IS(NEBULA_DTYPE_C128, 10);
IS(NEBULA_DTYPE_BOOL, 11);
IS(NEBULA_EVENT_DURABLE, 0);
IS(NEBULA_EVENT_LOST, 1);
IS(NEBULA_EVENT_STORAGE, 2);
IS(NEBULA_EVENT_LATE, 3);
IS(NEBULA_EVENT_OTHER_AGENT, 4);
IS(NEBULA_EVENT_EVICTION, 5);
IS(NEBULA_EVENT_METADATA, 6);
IS(NEBULA_CLOUD_AZURE, 0);
IS(NEBULA_CLOUD_AWS, 1);
IS(NEBULA_CLOUD_GCE, 2);
IS(NEBULA_REPORT_VERSIONS, 0);
IS(NEBULA_REPORT_STATUS, 1);
IS(NEBULA_REPORT_HISTORY, 2);
IS(NEBULA_REPORT_MEMORY, 3);
