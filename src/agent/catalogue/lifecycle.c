#include <string.h>

#include "agent/catalogue/lifecycle.h"

#define TO(state) (1u << (state))
#define STATE_COUNT (NEBULA_STATE_FAILED + 1)

static const unsigned moves_from[STATE_COUNT] = {
        [NEBULA_STATE_CAPTURING] = TO(NEBULA_STATE_CAPTURED) | TO(NEBULA_STATE_FAILED),
        [NEBULA_STATE_CAPTURED] = TO(NEBULA_STATE_COMMITTED) | TO(NEBULA_STATE_FAILED),
        [NEBULA_STATE_COMMITTED] = TO(NEBULA_STATE_REPLICATED) | TO(NEBULA_STATE_DURABLE) | TO(NEBULA_STATE_FAILED),
        [NEBULA_STATE_REPLICATED] = TO(NEBULA_STATE_DURABLE) | TO(NEBULA_STATE_FAILED),
        [NEBULA_STATE_DURABLE] = 0,
        [NEBULA_STATE_FAILED] = 0,
};

void lifecycle_init(struct lifecycle *life, enum nebula_state state, double at)
{
        memset(life, 0, sizeof *life);
        life->state = state;
        life->moves[0] = (struct lifecycle_move){ state, at };
        life->move_count = 1;
}

bool lifecycle_allowed(enum nebula_state from, enum nebula_state to)
{
        return (unsigned)from < STATE_COUNT && (unsigned)to < STATE_COUNT && (moves_from[from] & TO(to));
}

bool lifecycle_move(struct lifecycle *life, enum nebula_state to, double at)
{
        if (!lifecycle_allowed(life->state, to) || life->move_count >= LIFECYCLE_MOVE_MAX)
                return false;
        life->moves[life->move_count++] = (struct lifecycle_move){ to, at };
        life->state = to;
        return true;
}

double lifecycle_at(const struct lifecycle *life, enum nebula_state state)
{
        for (uint32_t i = 0; i < life->move_count; i++)
                if (life->moves[i].state == state)
                        return life->moves[i].at;
        return 0;
}

bool lifecycle_complete(enum nebula_state state)
{
        return state == NEBULA_STATE_COMMITTED || state == NEBULA_STATE_REPLICATED || state == NEBULA_STATE_DURABLE;
}

bool lifecycle_reached(enum nebula_state state, enum nebula_state wanted)
{
        return state != NEBULA_STATE_FAILED && state >= wanted;
}

bool lifecycle_sound(const struct lifecycle *life)
{
        if (!life->move_count || life->move_count > LIFECYCLE_MOVE_MAX ||
            life->moves[life->move_count - 1].state != life->state)
                return false;
        for (uint32_t i = 1; i < life->move_count; i++)
                if (!lifecycle_allowed(life->moves[i - 1].state, life->moves[i].state))
                        return false;
        return true;
}
