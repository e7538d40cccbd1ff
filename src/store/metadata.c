/* Asks the metadata services of clouds whether this machine is about to go. */
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "base/conf.h"
#include "base/error.h"
#include "os/os.h"
#include "store/http/http.h"
#include "store/notice.h"

#define HOST "http://169.254.169.254"
#define HOST_OF_GCE "http://metadata.google.internal"
#define ANSWER_MS 2000 /* the service is on this machine; only Azure's first answer may take minutes, and the next question gets it */
/* If the service names no time. */
#define AZURE_S 30
#define AWS_S 120
#define GCE_S 30

/* An answer without text (404): there is no such object. */
static enum nebula_status ask(const char *method, const char *host, const char *path, const char *name, const char *value,
                              struct http_response *ret_response, struct nebula_error *error)
{
        const struct http_header header = { name, value };
        const char *base = conf_env("NEBULA_METADATA_URL") ? conf_env("NEBULA_METADATA_URL") : host;
        size_t length = strlen(base);
        char url[600];
        enum nebula_status status;

        snprintf(url, sizeof url, "%.*s%s", (int)(length - (base[length - 1] == '/')), base, path);
        status = http_send(&(struct http_request){ .method = method, .url = url, .headers = &header, .header_count = 1, .is_local = true,
                                                   .connect_ms = ANSWER_MS, .answer_ms = ANSWER_MS, .retry_ms = -1 },
                           ret_response, error);
        if (status || ret_response->status == 200)
                return status;
        status = ret_response->status == 404 ? NEBULA_OK : error_set(error, NEBULA_UNAVAILABLE, 0, "%s answers %d", url, ret_response->status);
        http_response_done(ret_response);
        *ret_response = (struct http_response){ 0 };
        return status;
}

/* Asks for what stays the same. */
static enum nebula_status ask_once(const char *method, const char *path, const char *name, const char *value, char kept[NOTICE_KEPT_MAX],
                                   struct nebula_error *error)
{
        struct http_response response;
        enum nebula_status status = kept[0] ? NEBULA_OK : ask(method, HOST, path, name, value, &response, error);

        if (status || kept[0])
                return status;
        if (!response.text_size || response.text_size >= NOTICE_KEPT_MAX)
                status = error_set(error, NEBULA_UNAVAILABLE, 0, "the answer to %s is not as expected", path);
        else
                memcpy(kept, response.text, response.text_size + 1);
        http_response_done(&response);
        return status;
}

static enum nebula_status not_understood(struct nebula_error *error)
{
        return error_set(error, NEBULA_UNAVAILABLE, 0, "the answer is not as expected");
}

static double seconds_until(int64_t when)
{
        double seconds = (double)when - (double)os->wall_ns() / 1e9;

        return seconds > 0 ? seconds : 0;
}

static bool is_among(const json_t *names, const char *wanted)
{
        const json_t *name;
        size_t i;

        json_array_foreach(names, i, name)
                if (json_string_value(name) && !strcmp(json_string_value(name), wanted))
                        return true;
        return false;
}

/* "Freeze" only pauses the machine. */
static bool ends_machine(const char *type)
{
        return type && (!strcmp(type, "Preempt") || !strcmp(type, "Terminate") || !strcmp(type, "Reboot") || !strcmp(type, "Redeploy"));
}

/* The events are those of the whole scale set. https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events */
static void find_event(const json_t *events, const char *machine, struct notice *notice)
{
        const json_t *event;
        size_t i;

        json_array_foreach(events, i, event) {
                const char *type = json_string_value(json_object_get(event, "EventType")), *before = json_string_value(json_object_get(event, "NotBefore"));
                int64_t when;

                if (notice->is_there || !ends_machine(type) || !is_among(json_object_get(event, "Resources"), machine))
                        continue;
                notice->is_there = true;
                notice->seconds = before && http_date_parse(before, &when) ? seconds_until(when) : AZURE_S;
                snprintf(notice->text, sizeof notice->text, "Azure's scheduled event %s", type);
        }
}

static enum nebula_status ask_azure(char kept[NOTICE_KEPT_MAX], struct notice *notice, struct nebula_error *error)
{
        struct http_response response;
        const json_t *events;
        json_t *body;
        enum nebula_status status = ask_once("GET", "/metadata/instance/compute/name?api-version=2021-02-01&format=text", "Metadata", "true", kept, error);

        if (!status)
                status = ask("GET", HOST, "/metadata/scheduledevents?api-version=2020-07-01", "Metadata", "true", &response, error);
        if (status || !response.text)
                return status;
        body = json_loadb(response.text, response.text_size, 0, NULL);
        events = json_object_get(body, "Events");
        if (json_is_array(events))
                find_event(events, kept, notice);
        else
                status = not_understood(error);
        json_decref(body);
        http_response_done(&response);
        return status;
}

/* By IMDSv2. https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html */
static enum nebula_status ask_aws(char kept[NOTICE_KEPT_MAX], struct notice *notice, struct nebula_error *error)
{
        struct http_response response;
        const char *action, *time;
        int64_t when;
        json_t *body;
        enum nebula_status status = ask_once("PUT", "/latest/api/token", "X-aws-ec2-metadata-token-ttl-seconds", "21600", kept, error);

        if (!status)
                status = ask("GET", HOST, "/latest/meta-data/spot/instance-action", "X-aws-ec2-metadata-token", kept, &response, error);
        if (status || !response.text)
                return status;
        body = json_loadb(response.text, response.text_size, 0, NULL);
        action = json_string_value(json_object_get(body, "action"));
        time = json_string_value(json_object_get(body, "time"));
        if (action) {
                notice->is_there = true;
                notice->seconds = time && http_date_parse_iso(time, &when) ? seconds_until(when) : AWS_S;
                snprintf(notice->text, sizeof notice->text, "AWS's spot notice %.60s", action);
        } else {
                status = not_understood(error);
        }
        json_decref(body);
        http_response_done(&response);
        return status;
}

/* https://cloud.google.com/compute/docs/instances/create-use-preemptible */
static enum nebula_status ask_gce(struct notice *notice, struct nebula_error *error)
{
        struct http_response response;
        enum nebula_status status = ask("GET", HOST_OF_GCE, "/computeMetadata/v1/instance/preempted", "Metadata-Flavor", "Google", &response, error);

        if (status || !response.text)
                return status;
        if (!strncmp(response.text, "TRUE", 4))
                *notice = (struct notice){ true, GCE_S, "GCE's preemption" };
        http_response_done(&response);
        return NEBULA_OK;
}

enum nebula_status metadata_ask(enum nebula_cloud cloud, char kept[NOTICE_KEPT_MAX], struct notice *ret_notice, struct nebula_error *error)
{
        *ret_notice = (struct notice){ 0 };
        if (cloud == NEBULA_CLOUD_AZURE)
                return ask_azure(kept, ret_notice, error);
        return cloud == NEBULA_CLOUD_AWS ? ask_aws(kept, ret_notice, error) : ask_gce(ret_notice, error);
}
