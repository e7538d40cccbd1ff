#include "agent/catalogue/findings.h"

#include <stdarg.h>
#include <stdio.h>

#include "agent/catalogue/catalogue.h"
#include "agent/log.h"

void finding_note(struct catalogue *catalogue, struct job *job, enum finding_kind kind, const char *tag, const char *format, ...)
{
        struct finding *finding = &job->findings[kind];
        va_list arguments;

        va_start(arguments, format);
        vsnprintf(finding->text, sizeof finding->text, format, arguments);
        va_end(arguments);
        snprintf(finding->tag, sizeof finding->tag, "%s", tag);
        finding->at = catalogue_moment(catalogue);
        finding->count++;
        if (!(finding->count & (finding->count - 1))) /* what a program does at each save would be one line for each */
                log_event(kind == FINDING_ROTTEN ? LOG_LEVEL_ERROR : LOG_LEVEL_WARN, "%s: %s", tag, finding->text);
        catalogue_signal_event(catalogue, job);
}
