#include "nebula.h"

const char *nebula_status_name(enum nebula_status status)
{
        switch (status) {
        case NEBULA_OK:
                return "ok";
        case NEBULA_TIMEOUT:
                return "timeout";
        case NEBULA_BUSY:
                return "busy";
        case NEBULA_NOT_FOUND:
                return "not_found";
        case NEBULA_STORAGE:
                return "storage";
        case NEBULA_NO_SPACE:
                return "no_space";
        case NEBULA_CORRUPT:
                return "corrupt";
        case NEBULA_FAILED:
                return "failed";
        case NEBULA_NO_MEMORY:
                return "no_memory";
        case NEBULA_UNAVAILABLE:
                return "unavailable";
        case NEBULA_INTERNAL:
                return "internal";
        case NEBULA_INVALID:
                return "invalid";
        }
        return "unknown"; /* the number comes from a newer version */
}

const char *nebula_state_name(enum nebula_state state)
{
        switch (state) {
        case NEBULA_STATE_CAPTURING:
                return "capturing";
        case NEBULA_STATE_CAPTURED:
                return "captured";
        case NEBULA_STATE_COMMITTED:
                return "committed";
        case NEBULA_STATE_REPLICATED:
                return "replicated";
        case NEBULA_STATE_DURABLE:
                return "durable";
        case NEBULA_STATE_FAILED:
                return "failed";
        }
        return "unknown";
}
