// SPDX-License-Identifier: GPL-2.0-only
//! The pod of deploy/kubernetes/ as a node would run it: its containers, made of the manifest and run by crun, which nodes use
//! too. What Kubernetes itself does is not here, nor are seccomp and AppArmor, whose profiles are the node's.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::host::Service;

const MANIFEST: &str = include_str!("../../deploy/kubernetes/cohort.yaml");
const FOLDER: &str = "/tmp/pod";
const LOG: &str = "/out/pod.log";
/// The name of the one that runs.
const NAME: &str = "pod";

/// The pod.
pub struct Pod {
    spec: Value,
}

impl Pod {
    /// Makes what a node makes before it starts containers: their root, and the folders for volumes.
    pub fn of_manifest() -> Result<Self> {
        let objects: Result<Vec<Value>, _> = serde_yaml_ng::Deserializer::from_str(MANIFEST)
            .map(Value::deserialize)
            .collect();
        let objects = objects?;
        let of_kind = |kind| {
            let object = objects.iter().find(|object| object["kind"] == kind);
            object.with_context(|| format!("there is no {kind}"))
        };
        // This host's own files without what is mounted there; the program is where the image has it.
        let root = format!("{FOLDER}/root");
        fs::create_dir_all(&root)?;
        run(Command::new("mount").args(["--bind", "/", &root]))?;
        fs::copy("/cohort/bin/cohort", "/usr/sbin/cohort")?;
        let settings = format!("{FOLDER}/settings");
        fs::create_dir_all(&settings)?;
        for (name, text) in of_kind("ConfigMap")?["data"]
            .as_object()
            .into_iter()
            .flatten()
        {
            let text = text.as_str().context("it is text")?;
            fs::write(Path::new(&settings).join(name), text)?;
        }
        let spec = of_kind("DaemonSet")?["spec"]["template"]["spec"].clone();
        Ok(Self { spec })
    }

    /// Starts a container of the pod.
    pub fn start(&self, name: &str) -> Result<Service> {
        let config = self.config(name)?;
        fs::write(format!("{FOLDER}/config.json"), config.to_string())?;
        let log = File::options().create(true).append(true).open(LOG)?;
        let mut command = Command::new("crun");
        command
            .args(["--cgroup-manager=disabled", "run", "--bundle", FOLDER, NAME])
            .stdout(log.try_clone()?)
            .stderr(log);
        Ok(Service(command.spawn().context("crun")?))
    }

    /// Tells the container that runs to end, as a node does: its first process only.
    pub fn terminate(&self) -> Result<()> {
        run(Command::new("crun").args(["kill", NAME, "TERM"]))
    }

    /// What containers have printed.
    pub fn said(&self) -> Result<String> {
        Ok(fs::read_to_string(LOG)?)
    }

    /// What the runtime is told of a container.
    fn config(&self, name: &str) -> Result<Value> {
        let lists = [&self.spec["initContainers"], &self.spec["containers"]];
        let mut containers = lists.into_iter().filter_map(Value::as_array).flatten();
        let container = containers.find(|container| container["name"] == name);
        let container = container.with_context(|| format!("there is no container {name}"))?;
        let security = &container["securityContext"];
        let added = security["capabilities"]["add"].as_array();
        let capabilities: Vec<String> = added
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .map(|name| format!("CAP_{name}"))
            .collect();
        let mut mounts = vec![
            json!({"destination": "/proc", "type": "proc", "source": "proc"}),
            json!({"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]}),
            json!({"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro", "nosuid", "noexec", "nodev"]}),
        ];
        for mount in container["volumeMounts"].as_array().into_iter().flatten() {
            let rights = match mount["readOnly"] == true {
                true => "ro",
                false => "rw",
            };
            mounts.push(json!({
                "destination": mount["mountPath"],
                "type": "bind",
                "source": self.source(&mount["name"])?,
                "options": ["rbind", rights],
            }));
        }
        ensure!(self.spec["hostPID"] == true, "it has processes of its own");
        Ok(json!({
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": self.spec["securityContext"]["runAsUser"], "gid": 0},
                "args": container["command"],
                "cwd": "/",
                "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"],
                "noNewPrivileges": security["allowPrivilegeEscalation"] == false,
                "capabilities": {
                    "bounding": capabilities,
                    "effective": capabilities,
                    "permitted": capabilities,
                },
            },
            "root": {"path": "root", "readonly": security["readOnlyRootFilesystem"]},
            "mounts": mounts,
            "linux": {
                // Those of a pod that shares the node's processes, and nothing else.
                "namespaces": [
                    {"type": "mount"}, {"type": "network"}, {"type": "ipc"}, {"type": "uts"}, {"type": "cgroup"},
                ],
                "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"],
                "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
            },
        }))
    }

    /// The folder on the node that a volume is.
    fn source(&self, name: &Value) -> Result<String> {
        let mut volumes = self.spec["volumes"].as_array().into_iter().flatten();
        let volume = volumes.find(|volume| volume["name"] == *name);
        let volume = volume.with_context(|| format!("there is no volume {name}"))?;
        let Some(path) = volume["hostPath"]["path"].as_str() else {
            return Ok(format!("{FOLDER}/settings"));
        };
        if volume["hostPath"]["type"] == "DirectoryOrCreate" {
            fs::create_dir_all(path)?;
        }
        Ok(String::from(path))
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        // A test that failed may have left it.
        let _ = Command::new("crun")
            .args(["delete", "--force", NAME])
            .status();
        let _ = Command::new("umount")
            .arg(format!("{FOLDER}/root"))
            .status();
        let _ = fs::remove_file("/usr/sbin/cohort");
    }
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output()?;
    ensure!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
