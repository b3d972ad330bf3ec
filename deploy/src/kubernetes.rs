// SPDX-License-Identifier: GPL-2.0-only
//! Whether Kubernetes would take the manifest. Not for whether its containers work: that is seen in the lab
//! (`cohort-tests service`).

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

const MANIFEST: &str = include_str!("../kubernetes/cohort.yaml");

fn objects() -> Vec<Value> {
    let documents = serde_yaml_ng::Deserializer::from_str(MANIFEST);
    let objects = documents.map(|document| Value::deserialize(document).expect("it is YAML"));
    objects.collect()
}

/// `object` as the API's type for its kind. What that type does not know gets lost on the way: so nothing may.
fn typed<Kind: DeserializeOwned + serde::Serialize>(object: &Value) -> Kind {
    let typed: Kind = serde_json::from_value(object.clone()).expect("it is of its kind");
    let again = serde_json::to_value(&typed).expect("it is plain data");
    assert_eq!(again, *object, "a field that the API does not know");
    typed
}

fn daemon_set() -> DaemonSet {
    let objects = objects();
    let object = objects.iter().find(|object| object["kind"] == "DaemonSet");
    typed(object.expect("there is one"))
}

#[test]
fn each_object_is_one_of_the_api() {
    for object in objects() {
        match object["kind"].as_str() {
            Some("Namespace") => drop(typed::<Namespace>(&object)),
            Some("ConfigMap") => drop(typed::<ConfigMap>(&object)),
            Some("DaemonSet") => drop(typed::<DaemonSet>(&object)),
            other => panic!("nothing says what {other:?} may have"),
        }
    }
}

#[test]
#[should_panic(expected = "a field that the API does not know")]
fn a_field_that_the_api_does_not_know_is_found() {
    let mut object = objects()
        .into_iter()
        .find(|object| object["kind"] == "DaemonSet");
    let object = object.as_mut().expect("there is one");
    object["spec"]["template"]["spec"]["hostPid"] = Value::Bool(true);
    typed::<DaemonSet>(object);
}

#[test]
fn settings_in_the_manifest_are_settings() {
    let object = objects()
        .into_iter()
        .find(|object| object["kind"] == "ConfigMap");
    let settings: ConfigMap = typed(&object.expect("there is one"));
    let text = settings.data.expect("it has some").remove("cohort.toml");
    let file = tempfile::NamedTempFile::new().expect("a temporary file can be made");
    std::fs::write(file.path(), text.expect("it is there")).expect("it can be written");
    let words = ["--config", file.path().to_str().expect("it is text")];
    let options =
        cohort::scheduler::settings::RunOptions::from_words(words).expect("they are options");
    let host = cohort::host::paths::Host::live();
    cohort::scheduler::settings::Settings::resolve(&options, &host).expect("they are sound");
}

/// What security scanners ask, too.
#[test]
fn containers_have_no_more_than_the_manifest_spells_out() {
    let pod = daemon_set().spec.expect("it has one").template.spec;
    let pod = pod.expect("it has one");
    let volumes = pod.volumes.unwrap_or_default();
    let containers = pod
        .init_containers
        .into_iter()
        .flatten()
        .chain(pod.containers);
    for container in containers {
        let name = &container.name;
        let security = container.security_context.expect(name);
        assert_eq!(security.privileged, None, "{name}");
        assert_eq!(security.read_only_root_filesystem, Some(true), "{name}");
        assert_eq!(security.allow_privilege_escalation, Some(false), "{name}");
        let capabilities = security.capabilities.expect(name);
        assert_eq!(capabilities.drop, Some(vec![String::from("ALL")]), "{name}");
        for mount in container.volume_mounts.unwrap_or_default() {
            assert!(
                volumes.iter().any(|volume| volume.name == mount.name),
                "{name}"
            );
        }
    }
}
