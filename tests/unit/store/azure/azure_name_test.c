/* The Azure driver's parsing of names, URLs and settings, and its requests, without a server. */
#include "store/azure/azure_private.h"
#include "tap.h"

static struct nebula_error error;

static char *take(struct buf *buf)
{
        size_t size;
        char *text = buf_take(buf, &size);

        if (!text)
                abort();
        return text;
}

static char *encoded(const char *key)
{
        struct buf buf = { 0 };

        object_name_encode(&buf, key);
        return take(&buf);
}

static char *decoded(const char *name)
{
        struct buf buf = { 0 };

        object_name_decode(&buf, name);
        return take(&buf);
}

static void only_what_azure_changes_is_escaped(void)
{
        static const char *const pairs[][2] = {
                { "step100/model.pt", "step100/model.pt" }, { "a b+c~%2F/\xc3\xa4", "a b+c~%2F/\xc3\xa4" }, { "a\\b", "a%5Cb" }, { "x.", "x.%2E" },
                { "...", "...%2E" }, { "d./y", "d.%2E/y" }, { "x.%2E", "x.%252E" }, { "x%2E", "x%252E" }, { "x%2E.y", "x%2E.y" }, { "%5C", "%255C" },
                { "%255C", "%25255C" }, { "\xff", "%FF" }, { "\xc3", "%C3" }, { "a\n", "a%0A" }, { "\xc2\x85", "%C2%85" }, { "\xef\xbf\xbf", "%EF%BF%BF" },
                { "%25", "%25" }, { "%2", "%2" }, { "%6Catest", "%6Catest" },
        };

        for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
                char *name = encoded(pairs[i][0]), *key = decoded(pairs[i][1]);

                CHECK(!strcmp(name, pairs[i][1]) && !strcmp(key, pairs[i][0]));
                if (strcmp(name, pairs[i][1]) || strcmp(key, pairs[i][0]))
                        printf("# %s: %s, %s\n", pairs[i][0], name, key);
                free(name);
                free(key);
        }
}

/* Of all short texts over the bytes that matter. */
static void every_key_has_a_name_of_its_own(void)
{
        static const char letters[] = "a.%25CE/\\\xc3\xa4\xff";
        size_t count = sizeof letters - 1;

        for (unsigned long number = 0; number < 600000; number++) {
                char key[16], *name, *back;
                unsigned long rest = number;
                size_t used = 0;

                for (; rest; rest /= count + 1)
                        if (rest % (count + 1))
                                key[used++] = letters[rest % (count + 1) - 1];
                key[used] = 0;
                if (!store_key_sound(key))
                        continue;
                name = encoded(key);
                back = decoded(name);
                if (strcmp(back, key)) {
                        printf("# %s: %s: %s\n", key, name, back);
                        CHECK(!strcmp(back, key));
                }
                free(name);
                free(back);
        }
}

static void a_prefix_of_keys_is_one_of_their_names(void)
{
        static const char *const keys[] = { "d./o.", "d./o.x", "d.x/o", "t/%5Cx", "t/%x", "\xc3\xa4/\xff", "a\\b", "...", "x%2E/y" };

        for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
                for (size_t size = 0; size <= strlen(keys[i]); size++) {
                        struct buf buf = { 0 };
                        char prefix[32], *begin, *name = encoded(keys[i]);

                        snprintf(prefix, sizeof prefix, "%.*s", (int)size, keys[i]);
                        object_name_begin(&buf, prefix);
                        begin = take(&buf);
                        CHECK(!strncmp(name, begin, strlen(begin)));
                        free(begin);
                        free(name);
                }
}

static void clear(void)
{
        static const char *const names[] = { "AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN",
                                             "AZUREML_BLOB_ACCOUNT_NAME", "AZUREML_BLOB_ACCOUNT_KEY" };

        for (size_t i = 0; i < sizeof names / sizeof *names; i++)
                unsetenv(names[i]);
}

static void a_url_names_account_container_and_prefix(void)
{
        static const struct {
                const char *url, *account, *container, *endpoint, *prefix, *root, *sas;
        } cases[] = {
                { "az://acct/data/runs/7/", "acct", "data", "https://acct.blob.core.windows.net", "runs/7/", "az://acct/data/runs/7", NULL },
                { "az://acct/data", "acct", "data", "https://acct.blob.core.windows.net", "", "az://acct/data", NULL },
                { "https://acct.blob.core.windows.net/data/a%20b?sv=1&sig=S", "acct", "data", "https://acct.blob.core.windows.net", "a b/",
                  "https://acct.blob.core.windows.net/data/a b", "sv=1&sig=S" },
                { "https://acct.blob.core.usgovcloudapi.net/data", "acct", "data", "https://acct.blob.core.usgovcloudapi.net", "",
                  "https://acct.blob.core.usgovcloudapi.net/data", NULL },
                { "http://127.0.0.1:10000/devstoreaccount1/data/x", "devstoreaccount1", "data", "http://127.0.0.1:10000/devstoreaccount1", "x/",
                  "http://127.0.0.1:10000/devstoreaccount1/data/x", NULL },
        };
        static const char *const bad[] = { "az://", "az://a/b", "az://acct", "az://acct/", "az://acct/ab", "az://acct/Data", "az://acct/a--b", "az://acct/-ab",
                                           "az://acct/data/../x", "az://acct/data/a//b", "az://acct/data/x.", "az://acct/data/%zz", "az://acct/data/%5C", "az://a.b.c/data",
                                           "az://acct:1/data", "http://127.0.0.1/data" };

        clear();
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
                struct azure_address address;

                REQUIRE(store_azure_takes(cases[i].url) && azure_address_parse(cases[i].url, &address, &error) == NEBULA_OK);
                CHECK(!strcmp(address.account, cases[i].account) && !strcmp(address.container, cases[i].container) &&
                      !strcmp(address.endpoint, cases[i].endpoint) && !strcmp(address.prefix, cases[i].prefix) && !strcmp(address.root, cases[i].root));
                CHECK(cases[i].sas ? address.sas && !strcmp(address.sas, cases[i].sas) : !address.sas);
                azure_address_done(&address);
        }
        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
                struct azure_address address;
                enum nebula_status status = azure_address_parse(bad[i], &address, &error);

                CHECK(status == NEBULA_INVALID);
                if (status != NEBULA_INVALID)
                        printf("# taken: %s\n", bad[i]);
        }
        CHECK(!store_azure_takes("https://example.com/data") && !store_azure_takes("/data") && !store_azure_takes("s3://data"));
}

static void a_connection_string_names_the_endpoint(void)
{
        static const char *const bad[] = { "nonsense", "AccountKey=U0VDUkVU", "AccountName=a;SECRET", "=;=", "\"AccountName=acct;AccountKey=U0VDUkVU\"" };
        struct azure_connection found;
        struct azure_address address;

        REQUIRE(azure_connection_parse("DefaultEndpointsProtocol=https;AccountName=acct;AccountKey=a2V5==;EndpointSuffix=core.chinacloudapi.cn", &found, &error) == NEBULA_OK);
        CHECK(!strcmp(found.account, "acct") && !strcmp(found.key, "a2V5==") && !strcmp(found.endpoint, "https://acct.blob.core.chinacloudapi.cn") && !found.sas);
        azure_connection_done(&found);
        REQUIRE(azure_connection_parse("BlobEndpoint=https://acct.blob.core.windows.net/;SharedAccessSignature=sv=1&sig=x%3D", &found, &error) == NEBULA_OK);
        CHECK(!strcmp(found.account, "acct") && !strcmp(found.sas, "sv=1&sig=x%3D") && !strcmp(found.endpoint, "https://acct.blob.core.windows.net"));
        azure_connection_done(&found);
        REQUIRE(azure_connection_parse("UseDevelopmentStorage=true;", &found, &error) == NEBULA_OK);
        CHECK(!strcmp(found.account, "devstoreaccount1") && !strcmp(found.endpoint, "http://127.0.0.1:10000/devstoreaccount1") && found.key);
        azure_connection_done(&found);
        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
                CHECK(azure_connection_parse(bad[i], &found, &error) == NEBULA_INVALID && !strstr(error.message, "SECRET") && !strstr(error.message, "U0V"));
        clear();
        setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=acct;AccountKey=a2V5;BlobEndpoint=http://127.0.0.1:1/acct", 1);
        REQUIRE(azure_address_parse("az://acct/data", &address, &error) == NEBULA_OK);
        CHECK(!strcmp(address.endpoint, "http://127.0.0.1:1/acct"));
        azure_address_done(&address);
        REQUIRE(azure_address_parse("az://other/data", &address, &error) == NEBULA_OK);
        CHECK(!strcmp(address.endpoint, "https://other.blob.core.windows.net"));
        azure_address_done(&address);
        clear();
}

/* The source of the credential for az://acct/data; "": an identity; "!": refused. */
static const char *source(const char *url)
{
        static char text[64];
        struct azure_credential credential = { 0 };
        struct azure_address address;

        if (azure_address_parse(url, &address, &error) || azure_credential_find(&address, &credential, &error))
                strcpy(text, "!");
        else
                snprintf(text, sizeof text, "%s", credential.proof == AZURE_PROOF_TOKEN ? "" : credential.source);
        azure_credential_done(&credential);
        azure_address_done(&address);
        return text;
}

static void credentials_have_an_order_and_belong_to_one_account(void)
{
        clear();
        CHECK(!strcmp(source("az://acct/data"), ""));
        setenv("AZURE_STORAGE_SAS_TOKEN", "?sv=1&sig=x", 1);
        CHECK(!strcmp(source("az://acct/data"), "AZURE_STORAGE_SAS_TOKEN"));
        setenv("AZUREML_BLOB_ACCOUNT_KEY", "a2V5", 1);
        CHECK(!strcmp(source("az://acct/data"), "AZURE_STORAGE_SAS_TOKEN"));
        setenv("AZUREML_BLOB_ACCOUNT_NAME", "acct", 1);
        CHECK(!strcmp(source("az://acct/data"), "AZUREML_BLOB_ACCOUNT_KEY"));
        setenv("AZURE_STORAGE_KEY", "a2V5", 1);
        CHECK(!strcmp(source("az://acct/data"), "AZURE_STORAGE_KEY"));
        setenv("AZURE_STORAGE_ACCOUNT", "other", 1);
        CHECK(!strcmp(source("az://acct/data"), "AZUREML_BLOB_ACCOUNT_KEY") && !strcmp(source("az://other/data"), "AZURE_STORAGE_KEY"));
        setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=acct;AccountKey=a2V5", 1);
        CHECK(!strcmp(source("az://acct/data"), "AZURE_STORAGE_CONNECTION_STRING") && !strcmp(source("az://other/data"), "AZURE_STORAGE_KEY"));
        CHECK(!strcmp(source("https://acct.blob.core.windows.net/data?sig=x"), "the SAS of the storage path"));
        clear();
        setenv("AZURE_STORAGE_KEY", "SECRET!", 1);
        CHECK(!strcmp(source("az://acct/data"), "!") && !strstr(error.message, "SECRET"));
        clear();
        setenv("AZURE_STORAGE_SAS_TOKEN", "SECRET", 1);
        CHECK(!strcmp(source("az://acct/data"), "!") && !strstr(error.message, "SECRET"));
        clear();
}

/* The example of "Authorize with Shared Key" in the reference of Azure Storage, but for the version of the protocol. */
static void the_string_to_sign_is_that_of_the_reference(void)
{
        struct object_call call = { .method = "GET" }, put = { .method = "PUT", .body_size = 11 };
        char *text;

        object_param(&call, "timeout", "20");
        object_param(&call, "restype", "container");
        object_param(&call, "comp", "metadata");
        text = azure_string_to_sign("myaccount", "/mycontainer", &call, "Fri, 26 Jun 2015 23:39:12 GMT");
        CHECK(!strcmp(text, "GET\n\n\n\n\n\n\n\n\n\n\n\nx-ms-date:Fri, 26 Jun 2015 23:39:12 GMT\nx-ms-version:" AZURE_VERSION
                            "\n/myaccount/mycontainer\ncomp:metadata\nrestype:container\ntimeout:20"));
        free(text);
        object_header(&put, "x-ms-meta-nebula", "id");
        object_header(&put, "x-ms-blob-type", "BlockBlob");
        object_header(&put, "If-None-Match", "*");
        object_header(&put, "If-Match", NULL);
        text = azure_string_to_sign("acct", "/acct/data/a%20b", &put, "now");
        CHECK(!strcmp(text, "PUT\n\n\n11\n\n\n\n\n\n*\n\n\nx-ms-blob-type:BlockBlob\nx-ms-date:now\nx-ms-meta-nebula:id\nx-ms-version:" AZURE_VERSION
                            "\n/acct/acct/data/a%20b"));
        free(text);
}

TAP_MAIN(TEST(only_what_azure_changes_is_escaped), TEST(every_key_has_a_name_of_its_own), TEST(a_prefix_of_keys_is_one_of_their_names),
         TEST(a_url_names_account_container_and_prefix), TEST(a_connection_string_names_the_endpoint),
         TEST(credentials_have_an_order_and_belong_to_one_account), TEST(the_string_to_sign_is_that_of_the_reference))
