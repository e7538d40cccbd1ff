#include "agent/agent.h"
#include "cli/cli.h"

/* The agent reads its own command line; this is only its place in the table. */
int command_agent(int argc, char **argv)
{
        return agent_main(argc, argv);
}
