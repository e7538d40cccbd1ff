#include "agent/agent.h"
#include "cli/cli.h"

/* The agent parses its own command line; this is its entry in the table. */
int command_agent(int argc, char **argv)
{
        return agent_main(argc, argv);
}
