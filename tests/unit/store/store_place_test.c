/* One place in an object store has one path, without its signature. */
#include <stdio.h>
#include <string.h>

#include "store/place.h"
#include "tap.h"

static void each_spelling_of_a_place_is_one_path(void)
{
        static const char *const same[][2] = {
                { "https://acct.blob.core.windows.net/data/run", "https://Acct.BLOB.core.windows.net:443//data/run//?sv=1&sig=SECRET" },
                { "https://acct.blob.core.windows.net:8443/data/run", "https://acct.blob.core.windows.net:8443/data/run" },
                { "http://127.0.0.1:10000/acct/data", "http://127.0.0.1:10000/acct/data/" },
                { "http://[::1]/acct/data", "http://[::1]:80/acct/data" },
                { "az://acct,other/data", "az://ACCT,other/data/?sig=SECRET" },
                { "az://acct", "az://acct/" },
                { "abfss://data@acct.dfs.core.windows.net/a%20b", "abfss://data@ACCT.dfs.core.windows.net/a%20b" },
                { "abfss://Data@acct.dfs.core.windows.net", "abfss://Data@acct.dfs.core.windows.net" }, /* the driver refuses it */
                { "s3://one,two/run/1", "s3://one,two//run%2F1/" },
                { "s3://BUCKET/x", "s3://BUCKET/x" },
                { "gs://bucket/\u00fc", "gs://bucket/%c3%BC" },
                { "gs://bucket/a%25b%3Fc%23", "gs://bucket/%61%25b%3fc%23" },
                { "s3://bucket/%zz/", "s3://bucket/%zz/" },
                { "s3://bucket/%FF", "s3://bucket/%FF" },
                { "s3://bucket/x?sig=1", "s3://bucket/x?sig=1" },
                { "az://acct/data?x", "az://acct/data?x" },
                { "https://user:pw@host/data", "https://user:pw@host/data" },
                { "/a//b/", "/a//b/" },
                { "file:///a/", "file:///a/" },
                { "", "" },
        };

        for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
                char text[200];

                strcpy(text, same[i][1]);
                place_normalize(text);
                CHECK(!strcmp(text, same[i][0]));
                if (strcmp(text, same[i][0]))
                        printf("# %s\n", text);
                place_normalize(text); /* a second time changes nothing */
                CHECK(!strcmp(text, same[i][0]));
        }
}

static void the_newest_signature_of_a_place_is_found_by_each_spelling(void)
{
        char url[100], *text;

        CHECK(!place_query("az://acct/data"));
        place_keep("az://acct/data"); /* none */
        CHECK(!place_query("az://acct/data"));
        place_keep("az://acct/data/?sig=ONE");
        place_keep("az://acct/other?sig=TWO");
        place_keep("az://acct/data?sig=THREE");
        CHECK((text = place_query("az://Acct/data/")) && !strcmp(text, "sig=THREE"));
        place_forget(text);
        CHECK((text = place_signed("az://acct/other")) && !strcmp(text, "az://acct/other?sig=TWO"));
        place_forget(text);
        CHECK((text = place_signed("az://acct/none")) && !strcmp(text, "az://acct/none"));
        place_forget(text);
        for (int i = 0; i < 100; i++) { /* more than are kept: the oldest goes */
                snprintf(url, sizeof url, "az://acct/data/%d?sig=%d", i, i);
                place_keep(url);
        }
        CHECK(!place_query("az://acct/data"));
        CHECK((text = place_query("az://acct/data/99")) && !strcmp(text, "sig=99"));
        place_forget(text);
}

TAP_MAIN(TEST(each_spelling_of_a_place_is_one_path), TEST(the_newest_signature_of_a_place_is_found_by_each_spelling))
